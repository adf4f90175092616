"""Requests to a generator on a tiny base, their adapters, and what it answers."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch

from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, FinishReason, LoraSettings, Slo
from coserve.generate.generator import Generator
from coserve.kernels.lora.types import LoraPair
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from tests.support.tiny_models import VOCAB

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


def adapter(base: Base, seed: int, rank: int, suffixes: tuple[str, ...] = ("",)) -> LoraWeights:
    """Of random weights, at the sites whose names end so."""
    g = torch.Generator().manual_seed(seed)
    sites = {
        name: LoraPair(
            torch.randn(rank, site.in_features, generator=g) * 0.3,
            torch.randn(site.out_features, rank, generator=g) * 0.3,
            0.7,
        )
        for name, site in base.spec.sites.items()
        if name.endswith(suffixes)
    }
    return LoraWeights(LoraSettings(r=rank), sites)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    chance = random.Random(1000 * seed + length)
    return tuple(chance.randrange(3, VOCAB) for _ in range(length))


def request(id: str, tokens: tuple[int, ...], sampling: SamplingParams = GREEDY, ref: AdapterRef | None = None):
    return Generate(id=id, prompt=tokens, sampling=sampling, adapter=ref, slo=Slo(ttft=1, tpot=1))


def collect(gen: Generator, requests: Iterable[Generate]) -> dict[str, tuple[list[int], FinishReason | None]]:
    for one in requests:
        gen.add(one)
    found: dict[str, tuple[list[int], FinishReason | None]] = {}
    while gen.running:
        for message in gen.step():
            assert not isinstance(message, RequestFailed)
            before, finished = found.get(message.id, ([], None))
            assert finished is None
            found[message.id] = ([*before, *message.tokens], message.finished)
    assert gen.step() == []
    assert gen.pages_used == 0
    return found
