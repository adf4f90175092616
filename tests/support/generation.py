"""Requests to a generator on a tiny base, their adapters, and what it answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.logprobs import TokenLogprob
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, FinishReason, LoraSettings, Slo
from coserve.generate.generator import Generator
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.types import LoraPair
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from tests.support.executors import eager, graphs
from tests.support.lengths import OneMoreToken
from tests.support.lora_backends import GROUPED
from tests.support.shelf import Shelf
from tests.support.tiny_models import VOCAB

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


def adapter(
    base: Base, seed: int, rank: int, suffixes: tuple[str, ...] = ("",), experts: tuple[str, ...] = ()
) -> LoraWeights:
    """Of random weights, at the sites whose names end so; `experts`: and at the experts' whose names end so."""
    g = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g).to(base.device, base.dtype) * 0.3

    named = {name: site for name, site in base.spec.sites.items() if name.endswith(suffixes)}
    named |= {name: site for name, site in base.spec.experts.items() if name.endswith(experts)}
    sites = {
        name: LoraPair(
            drawn(site.experts * rank, site.in_features),
            drawn(site.experts * site.out_features, rank),
            0.7,
            experts=site.experts,
        )
        for name, site in named.items()
    }
    return LoraWeights(LoraSettings(r=rank, target_parameters=experts or None), sites)


def make_generator(
    base: Base,
    shelf: Shelf | None = None,
    *,
    tokens: int = 2048,
    page_tokens: int = 16,
    lora_backend: LoraBackend = GROUPED,
    fused: FusedBase | None = None,
    max_running: int = 16,
    step_tokens: int = 256,
    **options: int,
) -> Generator:
    """`fused`: steps are launched ahead of their tokens; `options`: of `Generator`."""
    kv = KvCache.for_base(base, tokens, page_tokens)
    plain = eager(base, kv, lora_backend)
    executor = plain if fused is None else graphs(fused, kv, lora_backend, max_running=max_running)
    return Generator(
        base,
        (shelf or Shelf()).store(),
        kv,
        executor,
        max_running=max_running,
        step_tokens=step_tokens,
        lengths=OneMoreToken(),
        **options,
    )


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    """Those of one seed begin alike."""
    chance = random.Random(seed)
    return tuple(chance.randrange(3, VOCAB) for _ in range(length))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    chance = random.Random(1000 * seed + length)
    return tuple(chance.randrange(3, VOCAB) for _ in range(length))


def request(id: str, tokens: tuple[int, ...], sampling: SamplingParams = GREEDY, ref: AdapterRef | None = None):
    return Generate(id=id, prompt=tokens, sampling=sampling, adapter=ref, slo=Slo(ttft=1, tpot=1))


@dataclass
class Answer:
    """All that is said of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: FinishReason | None = None
    failed: str | None = None

    @property
    def rounded(self) -> tuple[object, ...]:
        """Up to the rounding of another batch."""
        values = [
            [(round(each.logprob, 3), [(token, round(value, 3)) for token, value in each.top]) for each in entries]
            for entries in (self.prompt_logprobs, self.logprobs)
        ]
        return self.tokens, values, self.finished, self.failed


def answers(gen: Generator, requests: Sequence[Generate] = ()) -> dict[str, Answer]:
    """Of these requests, and of those that run already."""
    found = {one.id: Answer() for one in requests}
    for one in requests:
        gen.add(one)
    while gen.running:
        for message in gen.step():
            own = found.setdefault(message.id, Answer())
            assert own.finished is None and own.failed is None
            if isinstance(message, RequestFailed):
                own.failed = message.code
            else:
                own.tokens += message.tokens
                own.logprobs += message.logprobs
                own.prompt_logprobs += message.prompt_logprobs
                own.finished = message.finished
    assert gen.step() == []
    assert gen.pages_used == 0
    return found


def collect(gen: Generator, requests: Sequence[Generate]) -> dict[str, tuple[list[int], FinishReason | None]]:
    found = answers(gen, requests)
    assert not any(one.failed for one in found.values())
    return {id: (one.tokens, one.finished) for id, one in found.items()}
