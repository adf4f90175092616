"""Memory profiling: runs a generation step and a training micro-batch on the GPU, and plans the page pool from their
peaks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from coserve.core.gpu_memory import EXTRA_SLOTS, GRAPHS, TrainingCosts
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import DEFAULT_RANK, LoraSettings
from coserve.finetune.costs.training_costs import Phases, measure_costs, site_groups
from coserve.finetune.init import zero_adapter
from coserve.finetune.lora_tensors import cast
from coserve.finetune.memory_limits import StepRecompute
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.generate.schedule import SCORED_TOKENS
from coserve.kernels.attention.expanded import EXPANDED_TOKENS, StepTerms, most_expanded
from coserve.kernels.attention.interface import Attention, TokenRun
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.gpu.capture import gc_paused
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.memory.buffer import cache_dtype, page_layout
from coserve.memory.kv import KvCache
from coserve.memory.plan import SPARE_GRAPHS, GpuMemory, MemoryPlan, Work, make_plan
from coserve.memory.profile import (
    Profile,
    TrainingPeaks,
    load_graph_bytes,
    load_profile,
    measure,
    save_graph_bytes,
    save_profile,
)
from coserve.memory.state_pool import state_bytes
from coserve.model.agreement import on_all_ranks
from coserve.model.base import Base
from coserve.model.faults import out_of_memory
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.training.compiled_layers import CompiledLayers

SEQUENCE = 512
"""Longest sequence of profiled micro-batches. Attention memory is linear in tokens, so longer ones take no more."""
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Conditions:
    """Settings that a profile depends on, besides the base, the GPU and torch's version."""

    lora_backend: LoraBackend
    recompute: bool
    max_running: int
    page_tokens: int
    work: Work
    kv_cache_dtype: str = "auto"


def plan_memory(
    base: Base, conditions: Conditions, *, fraction: float, path: Path | None, meter: MemoryMeter | None = None
) -> MemoryPlan:
    """Plan the page pool that fits into `fraction` of the GPU's memory. The profile is measured once and cached at
    `path`; None: it is measured now. `meter`: None: the GPU's.

    Raises:
        UnsupportedBase: a base that cannot be trained layer by layer.
        ConfigError: see `make_plan`.
    """
    meter = meter or CudaMemoryMeter(base.device)
    key = _key(base, conditions)
    profile = None if path is None else load_profile(path, key)
    if profile is None:
        profile = _measure(base, conditions, meter)
        if path is not None:
            save_profile(path, key, profile)
    gc.collect()
    torch.cuda.empty_cache()
    meter.reset()  # exclude profiling from the peak that is compared with the plan
    free, total = torch.cuda.mem_get_info(base.device)
    page_tokens, work = conditions.page_tokens, conditions.work
    cached = cache_dtype(conditions.kv_cache_dtype, base.dtype, base.device)
    page_bytes = page_layout(base.kv_shapes, page_tokens, cached).page_bytes
    least = -(-work.step_tokens // page_tokens)
    graphs = None if path is None else load_graph_bytes(graphs_path(path), key)
    size = GRAPHS if graphs is None else round(SPARE_GRAPHS * graphs)
    size += conditions.lora_backend.kept_bytes
    slots = conditions.max_running + EXTRA_SLOTS
    return make_plan(
        GpuMemory(total, free),
        fraction,
        profile,
        work,
        page_bytes=page_bytes,
        least=least,
        graphs=size,
        states=slots * state_bytes(base.states, base.dtype),
    )


def keep_graph_bytes(base: Base, conditions: Conditions, path: Path, size: int) -> None:
    """Save the measured size of all graphs next to the profile at `path`, for the plan of the next start."""
    save_graph_bytes(graphs_path(path), _key(base, conditions), size)


def graphs_path(path: Path) -> Path:
    """Path of the graphs' measured size, next to the profile."""
    return path.with_name("graphs.json")


def _measure(base: Base, conditions: Conditions, meter: MemoryMeter) -> Profile:
    work = conditions.work
    profiler = MemoryProfiler(base, meter, conditions)
    return measure(profiler, step_tokens=work.step_tokens, micro_batch_tokens=work.micro_batch_tokens)


def _key(base: Base, conditions: Conditions) -> tuple[str, ...]:
    where = (torch.cuda.get_device_name(base.device), str(torch.__version__))  # torch's version is a subclass of str
    latent = any(shape.latent for shape in base.kv_shapes)
    cached = f"latents, {most_expanded(base.kv_shapes)} expanded" if latent else "heads"
    return (base.spec.fingerprint, base.spec.dtype, base.spec.quantization, cached, *where, repr(conditions))


def _longest_steps(kv: KvCache, tokens: int, pages: Sequence[int], context: int) -> Iterator[list[TokenRun]]:
    """Yield the runs of steps of `tokens` tokens, one of which takes the most memory. `context`: the longest of a
    sequence. The pages' contents do not matter: sequences share them, and one stands for several."""
    most, own = min(kv.most_expanded, tokens // EXPANDED_TOKENS * context), tuple(pages)
    short = EXPANDED_TOKENS - 1 if most else tokens
    yield [TokenRun(min(short, tokens - first), 0, own, slot=0) for first in range(0, tokens, short)]
    for count in (1, tokens // EXPANDED_TOKENS) if most else ():
        chunk, context = min(tokens, most) // count, most // count
        repeated = tuple(islice(cycle(pages), kv.pages_for(context)))
        runs = [TokenRun(chunk, context - chunk, repeated, slot=0)] * count
        others = [TokenRun(tokens - count * chunk, 0, own, slot=0)] if tokens > count * chunk else []
        yield [*runs, *others]


class MemoryMeter(Protocol):
    """Bytes that torch has allocated on a device. Every method synchronises the device first."""

    def now(self) -> int: ...
    def peak(self) -> int:
        """Maximum since `reset`."""
        ...

    def reset(self) -> None: ...


class NoMeter:
    """Implements `MemoryMeter` where there is no GPU."""

    def now(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def reset(self) -> None:
        pass


class CudaMemoryMeter:
    """Implements `MemoryMeter` on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Collect garbage, then disable collection inside: memory freed inside would lower the measured peak."""
    gc.collect()
    with gc_paused():
        yield


class MemoryProfiler:
    """Implements `memory.profile.Measures` for a base."""

    def __init__(
        self,
        base: Base,
        meter: MemoryMeter,
        conditions: Conditions,
        *,
        rank: int = DEFAULT_RANK,
        bd_blocks: int = 1,
        attention: Callable[[Sequence[int]], Attention] = PackedAttention,
        updates: bool = True,
        compiled: CompiledLayers | None = None,
        warm_up: bool = True,
    ) -> None:
        """`rank`, `bd_blocks`: LoRA rank and BD-LoRA blocks of the adapters; `attention`: makes the attention of packed
        rows from their bounds; `updates`: run optimizer steps (fake tensors cannot); `compiled`: see
        `MicroBatchRunner`; `warm_up`: run a step and a micro-batch once in the constructor, so that compilations and
        workspaces are not measured. Raises `UnsupportedBase` for a base that cannot be trained layer by layer."""
        self._base, self._meter = base, meter
        self._lora_backend, self._page_tokens = conditions.lora_backend, conditions.page_tokens
        self._sampled, self._logit_rows = conditions.max_running, conditions.max_running + SCORED_TOKENS
        self._recompute, self._kv_cache_dtype = conditions.recompute, conditions.kv_cache_dtype
        self._runner, self._rank = MicroBatchRunner(base, recompute=False, attention=attention, compiled=compiled), rank
        self._blocks, self._updates = bd_blocks, updates
        if warm_up:
            self.step(WARM_UP_TOKENS)
            self.micro_batch(WARM_UP_TOKENS)

    @gc_disabled()
    @torch.no_grad()
    def step(self, tokens: int) -> int:
        """Peak bytes of a generation step: `tokens` tokens of one adapter, with the most logits that a step may have
        (those of `max_running` sequences, sampled in fp32, and those of scored prompts), and with latents expanded for
        the longest context, or for none."""
        base = self._base
        kv = KvCache.for_base(base, tokens, self._page_tokens, kv_cache_dtype=self._kv_cache_dtype)
        pages = kv.allocate(kv.pages_for(tokens))
        assert pages is not None, "the cache was sized for them"
        batch = LoraBatch(
            Segments((0, tokens), (0,)), (cast(base.shard(self._adapter()), base.dtype),), self._lora_backend
        )
        tokens_T, positions_T = self._tokens(tokens), torch.arange(tokens, device=base.device) % base.spec.context
        keep = torch.arange(self._logit_rows, device=base.device) % tokens
        self._meter.reset()
        before = self._meter.now()
        for runs in _longest_steps(kv, tokens, pages, base.spec.context):
            attention = kv.attention(runs, StepTerms(batch.segments, partial(base.sites.terms, batch)))
            logits_KV = base.forward(tokens_T, positions_T, attention, lora=batch, keep=keep)
            logits_KV[: self._sampled].float().log_softmax(-1)
            del attention, logits_KV
        return self._meter.peak() - before

    def micro_batch(self, tokens: int) -> TrainingPeaks:
        """Peak bytes of a micro-batch of `tokens` tokens, in which all but the first token of each row are targets, and
        of the optimizer step."""
        found = self.phases(tokens, recomputed=self._base.spec.layers if self._recompute else 0)
        return TrainingPeaks(forward=found.forward, whole=found.whole, job=found.job)

    def costs(self, tokens: int) -> TrainingCosts:
        """See `memory.profile.Measures`. If memory runs out, smaller micro-batches are measured."""
        while True:
            try:
                most = self._runner.targets_at_once
                return measure_costs(self.phases, site_groups(self._base), self._base.spec, self._rank, tokens, most)
            except Exception as error:  # any kind: lack of memory has several
                if tokens <= WARM_UP_TOKENS or not out_of_memory(error):
                    raise
            tokens //= 2  # outside `except`: the error's traceback, which held tensors, is gone
            torch.cuda.empty_cache()

    def phases(
        self,
        tokens: int,
        *,
        recomputed: int = 0,
        partly: int = 0,
        targets: tuple[str, ...] | None = None,
        rank: int | None = None,
        positions: int | None = None,
    ) -> Phases:
        """Measure a micro-batch's bytes by phase. `recomputed`, `partly`: numbers of layers, see `RecomputePlan`;
        `targets`, `rank`: sites and LoRA rank of the adapter (None: all sites, the profiler's rank); `positions`: loss
        targets (None: all tokens but the first of each row). Raises if memory runs out; then all tensor-parallel ranks
        raise."""
        base = self._base
        mesh = None if base.sharding is None else base.sharding.mesh
        adapter, batch = partial(self._adapter, targets, rank), partial(self._packed, tokens, positions)
        return on_all_ranks(mesh, base.device, lambda: self._measured(adapter, batch, recomputed, partly))

    @gc_disabled()
    def _measured(
        self, adapter: Callable[[], LoraWeights], batch: Callable[[], PackedRows], recomputed: int, partly: int
    ) -> Phases:
        base, empty = self._base, self._meter.now()
        start = adapter()
        optimizer = AdapterOptimizer(
            start, base.spec, TrainingSettings(steps=1), base.dtype, partition=base.partition(start)
        )
        del start
        if self._updates:
            optimizer.step(targets=1, learning_rate=0.0)  # allocates the moments
        job = self._meter.now() - empty
        rows = batch()
        lora = LoraBatch(Segments((0, rows.bounds[-1]), (0,)), (optimizer.weights(),), self._lora_backend)
        self._meter.reset()
        before = self._meter.now()
        micro_steps = self._runner.forward_backward(
            rows, lora, optimizer.trainable, optimizer.grads, how=StepRecompute(recomputed, partly)
        )
        next(micro_steps)
        begin = self._meter.now() - before
        for _ in base.layers[1:]:
            next(micro_steps)
        kept, forward = self._meter.now() - before, self._meter.peak() - before
        while next(micro_steps, MicroStep.BACKWARD) is not MicroStep.BACKWARD:
            pass
        head = self._meter.peak() - before
        self._meter.reset()
        run_to_end(micro_steps)
        backward = self._meter.peak() - before
        if self._updates:
            optimizer.step(targets=max(1, rows.targets), learning_rate=0.0)
        update = self._meter.peak() - before
        return Phases(
            positions=rows.targets,
            begin=begin,
            kept=kept,
            forward=forward,
            head=head,
            backward=backward,
            whole=max(head, backward, update),
            job=job,
        )

    def _adapter(self, targets: tuple[str, ...] | None = None, rank: int | None = None) -> LoraWeights:
        settings = LoraSettings(r=rank or self._rank, targets=targets, bd_blocks=self._blocks)
        return zero_adapter(settings, self._base.spec, dtype=torch.float32, device=self._base.device)

    def _tokens(self, tokens: int) -> Tensor:
        return torch.arange(tokens, device=self._base.device) % self._base.spec.vocab

    def _packed(self, tokens: int, positions: int | None = None) -> PackedRows:
        longest = min(SEQUENCE, self._base.spec.context)
        bounds = (*range(0, tokens, longest), tokens)
        index_T = torch.arange(tokens, device=self._base.device)
        targets = [i for i in range(tokens) if i % longest][:positions]
        target_K = torch.tensor(targets, dtype=torch.int64, device=self._base.device)
        tokens_T = self._tokens(tokens)
        return PackedRows(tokens_T, index_T % longest, bounds, target_K - 1, tokens_T[target_K])
