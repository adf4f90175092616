"""Measures the time of compiled training layers for each recompute level: the memory plan chooses the fastest that
fits.

Times are device times of layers that run as CUDA graphs: launches by the host, the embedding and the head are excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from coserve.core.gpu_memory import Kept, LayerTime
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import DEFAULT_RANK, LoraSettings
from coserve.finetune.init import zero_adapter
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.memory_limits import StepRecompute
from coserve.finetune.micro_batch import MicroBatchRunner
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.gpu.timing import CudaClock
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.lora import LoraBatch
from coserve.model.training.compiled_layers import CompiledLayers

ROWS = (512, 2048)
"""Row lengths to measure, as far as the base's context allows."""
REPEATS = 6
"""Micro-batches per measurement. The first runs without graphs, the second is captured. The minimum counts, as other
processes may use the GPU meanwhile."""


class LayerTimer:
    """Runs micro-batches with one adapter of LoRA rank `DEFAULT_RANK` at every site."""

    def __init__(
        self, base: Base, compiled: CompiledLayers, backend: LoraBackend, graphs: LayerGraphs | None, clock: CudaClock
    ) -> None:
        """`graphs`: CUDA graphs of the compiled layers; None: layers run without graphs."""
        self._base, self._backend, self._clock = base, backend, clock
        self._runner = MicroBatchRunner(base, recompute=False, compiled=compiled, graphs=graphs)
        start = zero_adapter(LoraSettings(r=DEFAULT_RANK), base.spec, dtype=torch.float32, device=base.device)
        self._optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(steps=1), base.dtype)

    def times(self, tokens: int) -> dict[Kept, LayerTime]:
        """Times of a layer for each recompute level, from micro-batches of `tokens` tokens. The base must have several
        layers."""
        rows = sorted({min(row, tokens, self._base.spec.context) for row in ROWS})
        return {kept: _line([(row, self._of(kept, tokens, row)) for row in rows]) for kept in Kept}

    def _of(self, kept: Kept, tokens: int, row: int) -> float:
        """Minimum nanoseconds per token of a layer."""
        return min(self._once(kept, tokens, row) for _ in range(REPEATS)) * 1e9 / tokens

    def _once(self, kept: Kept, tokens: int, row: int) -> float:
        """Seconds of one layer's forward and backward, averaged over the layers. The first forward, which includes the
        embedding, and the first backward, which includes the end of the head, are excluded."""
        layers, rows = len(self._base.layers), self._rows(self._runner.padded_size(tokens), row)
        assert layers > 1, "expected several layers"
        how = StepRecompute(layers if kept is Kept.INPUT else 0, layers if kept is Kept.ATTENTION else 0)
        lora = LoraBatch(Segments((0, rows.tokens), (0,)), (self._optimizer.weights(),), self._backend)
        steps = self._runner.forward_backward(rows, lora, self._optimizer.trainable, self._optimizer.grads, how=how)
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
        """Pack rows of `row` tokens, the last one shorter, with one target."""
        device, vocab = self._base.device, self._base.spec.vocab
        index_T = torch.arange(tokens, device=device)
        target_K = torch.ones(1, dtype=torch.int64, device=device)
        bounds = (*range(0, tokens, row), tokens)
        return PackedRows(index_T % vocab, index_T % row, bounds, target_K - 1, target_K)


def _line(found: Sequence[tuple[int, float]]) -> LayerTime:
    """Fit a line through the first and last measurement: (row length, nanoseconds per token)."""
    (short, low), (long, high) = found[0], found[-1]
    slope = max(0.0, (high - low) / (long - short)) if long > short else 0.0
    return LayerTime(fixed=max(0.0, low - slope * short), per_row_token=slope)
