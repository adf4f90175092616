"""The micro-batches that a warm-up runs need every specialization that a job's can need."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coserve.engine.warming.step_mixes import SHORT_PROMPTS, micro_batch_sizes
from coserve.kernels.gpu.launcher import Grid, Launcher
from coserve.kernels.lora.segmented import launch_prefill, plan
from coserve.kernels.lora.segmented.block_sizes import DecodeBlocks, decode_blocks
from coserve.kernels.lora.segmented.gradients import gradients
from coserve.kernels.lora.segmented.plan import DECODE_ROWS
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, MainGrads
from tests.support.examples import by_day
from tests.support.launches import kinds

GROUPS = ((4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (14336, (4096,)))
"""Inputs and outputs of an 8B Llama's sites that share one input."""
SMALL = ((64, (64, 16, 16)), (64, (128, 128)), (128, (64,)))
Sizes = tuple[tuple[int, tuple[int, ...]], ...]


class Recorder:
    """What Triton would compile for the launches of a layer's forward and backward."""

    def __init__(self, groups: Sizes, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups, self.rank, self.found = groups, rank, set[object]()

        def record(
            launcher: Launcher, grid: Grid, tensors: list[Tensor], numbers: tuple[int, ...], **rest: int
        ) -> None:
            self.found.add(
                (
                    id(launcher),
                    kinds(launcher, tensors, numbers),
                    tuple(rest.items()),
                    tuple(own.dtype for own in tensors),
                )
            )

        monkeypatch.setattr(Launcher, "__call__", record)

    def run(self, tokens: int) -> set[object]:
        self.found = set()
        cut = plan.plan_of(Segments((0, tokens), (0,)), (self.rank,), torch.device("cpu"), train=True)
        for inputs, outputs in self.groups:
            pairs = [[self.pair(inputs, size)] for size in outputs]
            (table,) = plan.tables_of([pairs], torch.device("cpu"))
            x = torch.empty(tokens, inputs, dtype=torch.bfloat16)
            ys = torch.split(torch.empty(tokens, sum(outputs), dtype=torch.bfloat16), list(outputs), 1)
            h = launch_prefill.prefill(ys, ys, x, cut, table.table, keep=True)
            gradients([torch.empty_like(y) for y in ys], x, h, cut, table, inputs_need=True, weights_need=True)
        return self.found

    def pair(self, inputs: int, outputs: int) -> LoraPair:
        a, b = torch.empty(self.rank, inputs), torch.empty(outputs, self.rank)
        return LoraPair(a.bfloat16().requires_grad_(), b.bfloat16().requires_grad_(), 1.0, MainGrads(a, b))


@pytest.mark.parametrize(
    "case", by_day({"small": (SMALL, 16), "8b": (GROUPS, 16), "rank 64": (GROUPS, 64), "rank 8": (GROUPS, 8)}, "small")
)
def test_every_size_of_a_micro_batch_is_covered(case: tuple[Sizes, int], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(*case, monkeypatch)
    known = set[object]().union(*map(recorder.run, micro_batch_sizes(2048)))
    for tokens in (*range(1, 70), *range(70, 2049, 57), *range(80, 2049, 48)):
        assert recorder.run(tokens) <= known, tokens


@pytest.mark.parametrize("rank", [16, 64])
def test_every_number_of_short_prompts_is_covered(rank: int) -> None:
    def blocks(tiles: int) -> set[DecodeBlocks]:
        return {decode_blocks(inputs, outputs, tiles, tiles, DECODE_ROWS[1], rank) for inputs, outputs in GROUPS}

    known = set[DecodeBlocks]().union(*map(blocks, (*range(5), *SHORT_PROMPTS)))  # fewer prompts: other mixes
    for tiles in range(1, 257):
        assert blocks(tiles) <= known, tiles
