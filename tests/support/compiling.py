"""A generator that is compiled while it serves."""

from __future__ import annotations

from coserve.core.link.generation import Tokens
from coserve.core.sampling import SamplingParams
from coserve.generate.generator import Generator
from tests.support.generation import request


def ask(gen: Generator, id: str, length: int, seed: int | None = None) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.0 if seed is None else 1.2, seed=seed or 0)
    gen.add(request(id, tuple(range(3, 3 + length)), sampling))


def steps(gen: Generator, found: dict[str, list[int]], most: int = 1000) -> None:
    while gen.running and most:
        most -= 1
        for message in gen.step():
            assert isinstance(message, Tokens), message
            found.setdefault(message.id, []).extend(message.tokens)


def ask_all(gen: Generator) -> None:
    for id, length, seed in (("short", 4, None), ("long", 30, None), ("drawn", 9, 3)):
        ask(gen, id, length, seed)
