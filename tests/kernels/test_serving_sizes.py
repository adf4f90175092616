"""The steps that a warm-up runs need nearly every specialization of the LoRA kernels that a request's step can need."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from coserve.engine.warming.step_mixes import adapter_counts, rare_mixes, step_mixes
from coserve.kernels.gpu.launcher import Grid, Launcher
from coserve.kernels.lora.segmented import plan, terms
from coserve.kernels.lora.segmented.plan import GroupTable
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from tests.support.launches import kinds

CPU = torch.device("cpu")
SITES = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
"""Inputs and outputs of an 8B Llama's sites that share one input."""
STEPS = 200


class Recorder:
    """What Triton would compile for the LoRA terms of a layer."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.found = rank, set[object]()
        self._tables: dict[tuple[int, int], GroupTable] = {}

        def record(
            launcher: Launcher, grid: Grid, tensors: list[Tensor], numbers: tuple[int, ...], **rest: int
        ) -> None:
            self.found.add((id(launcher), kinds(launcher, tensors, numbers), tuple(rest.items())))

        monkeypatch.setattr(Launcher, "__call__", record)

    def run(self, tokens: Sequence[int], adapters: int) -> set[object]:
        """`tokens` of each sequence, whose adapters are taken in turn."""
        self.found = set()
        own = [sum(tokens[adapter::adapters]) for adapter in range(adapters)]
        bounds = tuple(sum(own[:count]) for count in range(adapters + 1))
        cut = plan.plan_of(Segments(bounds, tuple(range(adapters))), (self.rank,) * adapters, CPU, train=False)
        for group, (inputs, outputs) in enumerate(SITES):
            x = torch.empty(bounds[-1], inputs, dtype=torch.bfloat16)
            ys = torch.split(torch.empty(bounds[-1], sum(outputs), dtype=torch.bfloat16), list(outputs), 1)
            terms.add_(ys, x, cut, self._table(group, adapters).table)
        return self.found

    def _table(self, group: int, adapters: int) -> GroupTable:
        if (group, adapters) not in self._tables:
            inputs, outputs = SITES[group]
            a = torch.empty(self.rank, inputs).bfloat16()
            pairs = [[LoraPair(a, torch.empty(size, self.rank).bfloat16(), 1.0)] * adapters for size in outputs]
            (self._tables[group, adapters],) = plan.tables_of([pairs], CPU)
        return self._tables[group, adapters]


def random_step(rng: random.Random) -> tuple[list[int], int]:
    """Tokens of each sequence and the number of adapters, in a batch of 64 at most."""
    tokens, left = [1] * rng.randint(1, 60), 1900
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3, 4])):
        tokens.append(min(left, 1 + int(rng.lognormvariate(rng.choice([2, 4, 5, 6]), 1))))
        left = max(1, left - tokens[-1])
    return tokens, rng.randint(1, min(rng.choice([4, 32, 64]), len(tokens)))


@pytest.mark.parametrize("rank", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_nearly_every_step_of_requests_is_covered(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, rng, known = Recorder(rank, monkeypatch), random.Random(3), set[object]()
    for mix in (*step_mixes(64, 2048, 8192), *rare_mixes(64, 2048, 8192)):
        for count in adapter_counts(mix, 64):
            known |= recorder.run(mix.tokens, count)
    assert len(known) < 80, "each is compiled at a first start, for half a second"
    missing = [step for step in (random_step(rng) for _ in range(STEPS)) if not recorder.run(*step) <= known]
    assert len(missing) <= STEPS // 100, missing
