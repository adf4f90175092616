"""Requests that tell whether a prefix cache changes their answers: drawn from a seed, with log-probabilities."""

from __future__ import annotations

from coserve.core.link.generation import Generate
from coserve.core.logprobs import TokenLogprob
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.generate.generator import Generator
from coserve.model.base import Base
from tests.support.generation import adapter, answers
from tests.support.shelf import Shelf

Results = dict[str, tuple[list[int], list[TokenLogprob]]]
REFS = (AdapterRef("a", 1), AdapterRef("a", 2), AdapterRef("b", 1))


def shelf_of(base: Base) -> Shelf:
    """An adapter for each of `REFS`, made from its number."""
    return Shelf({ref: adapter(base, number, 3) for number, ref in enumerate(REFS)})


def request(
    id: str,
    prompt: tuple[int, ...],
    ref: AdapterRef | None = None,
    *,
    salt: str = "",
    max_tokens: int = 6,
    **sampling: float,
) -> Generate:
    params = SamplingParams(max_tokens=max_tokens, logprobs=2, seed=len(prompt), **sampling)
    return Generate(id=id, prompt=prompt, sampling=params, adapter=ref, slo=Slo(ttft=1, tpot=1), cache_salt=salt)


def run(gen: Generator, *requests: Generate) -> Results:
    found = answers(gen, requests)
    assert not any(one.failed for one in found.values())
    return {id: (one.tokens, one.logprobs) for id, one in found.items()}
