"""Measures how long compiled layers of training take, by what they keep: of what the memory plan chooses the fastest
that fits.

The times are the device's, of layers that run as CUDA graphs: the host's launches do not count, nor do the embedding
and the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from coserve.core.gpu_memory import Kept, LayerTime
from coserve.core.types import DEFAULT_RANK, LoraSettings, MicroStep, TrainingSettings
from coserve.finetune.init import zero_adapter
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.micro_batch import MicroBatchRunner
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.lora import LoraBatch
from coserve.model.training.compiled_layers import CompiledLayers

ROWS = (512, 2048)
"""Lengths of rows that are measured, as far as the base's context allows."""
REPEATS = 6
"""Micro-batches of a kind. The first is run without graphs, the second captured. The least time counts: other processes
may use the GPU meanwhile."""


class Clock(Protocol):
    """Times between points in the work of the current stream."""

    def mark(self) -> object: ...
    def seconds(self, begin: object, end: object) -> float:
        """Waits for both marks."""
        ...


class LayerTimer:
    """Runs micro-batches of one adapter of `DEFAULT_RANK` at every site."""

    def __init__(
        self, base: Base, compiled: CompiledLayers, backend: LoraBackend, graphs: LayerGraphs | None, clock: Clock
    ) -> None:
        """`graphs`: of the compiled layers; None: layers run without."""
        self._base, self._backend, self._clock = base, backend, clock
        self._runner = MicroBatchRunner(base, recompute=False, compiled=compiled, graphs=graphs)
        start = zero_adapter(LoraSettings(r=DEFAULT_RANK), base.spec, dtype=torch.float32, device=base.device)
        self._optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(steps=1), base.dtype)

    def times(self, tokens: int) -> dict[Kept, LayerTime]:
        """Of a layer of each kind, from micro-batches of `tokens` tokens. The base has several layers."""
        rows = sorted({min(row, tokens, self._base.spec.context) for row in ROWS})
        return {kept: _line([(row, self._of(kept, tokens, row)) for row in rows]) for kept in Kept}

    def _of(self, kept: Kept, tokens: int, row: int) -> float:
        """Least nanoseconds a token."""
        return min(self._once(kept, tokens, row) for _ in range(REPEATS)) * 1e9 / tokens

    def _once(self, kept: Kept, tokens: int, row: int) -> float:
        """Seconds of a layer's forward and backward, where all layers are alike. The first forward comes with the
        embedding, the first backward with what the head leaves to do: they do not count."""
        layers, rows = len(self._base.layers), self._rows(self._runner.padded_size(tokens), row)
        assert layers > 1, "expected several layers"
        counts = {Kept.ALL: (0, 0), Kept.ATTENTION: (0, layers), Kept.INPUT: (layers, 0)}[kept]
        lora = LoraBatch(Segments((0, rows.tokens), (0,)), (self._optimizer.weights(),), self._backend)
        steps = self._runner.forward_backward(
            rows, lora, self._optimizer.trainable, self._optimizer.grads, recomputed=counts[0], partly=counts[1]
        )
        next(steps)
        forward = self._span(lambda: [next(steps) for _ in range(layers - 1)])
        while next(steps) is not MicroStep.BACKWARD:
            pass
        next(steps)
        backward = self._span(lambda: [*steps])
        self._optimizer.zero_grad()
        return (forward + backward) / (layers - 1)

    def _span(self, run: Callable[[], object]) -> float:
        begin = self._clock.mark()
        run()
        return self._clock.seconds(begin, self._clock.mark())

    def _rows(self, tokens: int, row: int) -> PackedRows:
        """Rows of `row` tokens, the last one shorter; one target."""
        device, vocab = self._base.device, self._base.spec.vocab
        index_T = torch.arange(tokens, device=device)
        target_K = torch.ones(1, dtype=torch.int64, device=device)
        bounds = (*range(0, tokens, row), tokens)
        return PackedRows(index_T % vocab, index_T % row, bounds, target_K - 1, target_K)


def _line(found: Sequence[tuple[int, float]]) -> LayerTime:
    """Through the first and the last measurement: a length of rows, and its nanoseconds a token."""
    (short, low), (long, high) = found[0], found[-1]
    slope = max(0.0, (high - low) / (long - short)) if long > short else 0.0
    return LayerTime(fixed=max(0.0, low - slope * short), per_row_token=slope)
