"""Measurements for the memory plan of jobs, taken by a warm-up worker: memory and times of compiled training layers for
each recompute level, of which the plan chooses the fastest that fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from coserve.core.errors import UnsupportedBase
from coserve.core.gpu_memory import Kept, LayerTime
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import DEFAULT_RANK, LoraSettings
from coserve.engine.warming.caches import Caches
from coserve.engine.warmup.parts import TRAINING_LAYERS, TRAINING_LEVELS
from coserve.finetune.costs import training_costs
from coserve.finetune.init import zero_adapter
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.memory_limits import StepRecompute
from coserve.finetune.memory_profiling import Conditions, CudaMemoryMeter, MemoryProfiler
from coserve.finetune.micro_batch import MicroBatchRunner
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.gpu.capture import TRAINING_PRIORITY
from coserve.kernels.gpu.graph_memory import GraphMemory
from coserve.kernels.gpu.timing import CudaClock
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.memory.profile import save_layer_costs
from coserve.model.base import Base
from coserve.model.lora import LoraBatch
from coserve.model.training.compiled_layers import CompiledLayers

log = logging.getLogger(__name__)

MEASURED_TOKENS = 2048
"""Tokens of the largest micro-batch measured with compiled layers: their memory is linear in tokens."""


def measure_layers(layers: CompiledLayers, base: Base, conditions: Conditions, caches: Caches) -> None:
    """Measure and save the memory of training through layers that keep everything. Raises `torch.OutOfMemoryError`."""
    path = caches.path(TRAINING_LAYERS)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_layer_costs(path, _profiler(base, conditions, layers).costs(_tokens(conditions)))


def measure_levels(layers: CompiledLayers, base: Base, conditions: Conditions, caches: Caches) -> None:
    """Compile the layers that keep fewer activations, and save their memory and the times of all layers. Call it after
    `measure_layers`. Nothing is saved if the base cannot have such layers; the engine reports that when it loads them.

    Raises:
        UnsupportedBase: they cannot be measured; jobs then use layers that keep everything or rerun their forward.
        torch.OutOfMemoryError: memory ran out.
    """
    costs, tokens = caches.layer_costs(), _tokens(conditions)
    if costs is None:
        raise UnsupportedBase("layers that keep less are not measured: those that keep all were not")
    try:
        try:
            layers.compile_levels()
        except UnsupportedBase as error:
            log.warning("training: there are no layers that keep less: %s", error)
            return
        stays = {kept: layers.sites_kept(kept) for kept in (Kept.ATTENTION, Kept.INPUT)}
        stream = torch.cuda.Stream(base.device, priority=TRAINING_PRIORITY)  # type: ignore[no-untyped-call]
        graphs = LayerGraphs(layers, partial(GraphMemory, stream))
        times = LayerTimer(base, layers, conditions.lora_backend, graphs, CudaClock()).times(tokens)
        graphs.release()
        phases = _profiler(base, conditions, layers).phases
        found = training_costs.measure_levels(phases, costs, base.spec, stays, times, tokens)
        save_layer_costs(caches.path(TRAINING_LEVELS), found)
    finally:
        layers.forget_examples()


def _profiler(base: Base, conditions: Conditions, compiled: CompiledLayers) -> MemoryProfiler:
    return MemoryProfiler(base, CudaMemoryMeter(base.device), conditions, rank=DEFAULT_RANK, compiled=compiled)


def _tokens(conditions: Conditions) -> int:
    return min(MEASURED_TOKENS, conditions.work.micro_batch_tokens)


ROWS = (512, 2048)
"""Row lengths to measure, as far as the base's context allows."""
REPEATS = 6
"""Micro-batches per measurement. The first runs without graphs, the second is captured. The minimum counts, as other
processes may use the GPU meanwhile."""


class LayerTimer:
    """Runs micro-batches with one adapter of LoRA rank `DEFAULT_RANK` at every site. Times are device times of layers
    that run as CUDA graphs: launches by the host, the embedding and the head are excluded."""

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
