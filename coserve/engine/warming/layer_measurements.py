"""Measurements for the memory plan of jobs, taken by a warm-up worker: memory and times of compiled training layers."""

from __future__ import annotations

import logging
from functools import partial

import torch

from coserve.core.errors import UnsupportedBase
from coserve.core.gpu_memory import Kept
from coserve.core.types import DEFAULT_RANK
from coserve.engine.warming.caches import Caches
from coserve.engine.warmup.parts import TRAINING_LAYERS, TRAINING_LEVELS
from coserve.finetune.costs import training_costs
from coserve.finetune.costs.layer_times import LayerTimer
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.memory_profiling import Conditions, CudaMemoryMeter, MemoryProfiler
from coserve.kernels.gpu.capture import TRAINING_PRIORITY
from coserve.kernels.gpu.graph_memory import GraphMemory
from coserve.kernels.gpu.timing import CudaClock
from coserve.memory.profile import save_layer_costs
from coserve.model.base import Base
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
