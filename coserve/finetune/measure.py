"""The real step and the real micro-batch on a GPU, to see how much memory they take; and the plan that follows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from coserve.finetune.init import new_adapter
from coserve.finetune.optim import Learner, cast
from coserve.finetune.step import PackedRows, Stepper, run_to_end
from coserve.generate.schedule import SCORED_TOKENS
from coserve.kernels.attention.interface import Run
from coserve.kernels.gpu.capture import gc_paused
from coserve.kernels.lora.backend import Way
from coserve.kernels.lora.segments import Segments
from coserve.memory.buffer import page_layout
from coserve.memory.kv import KvCache
from coserve.memory.plan import Gpu, MemoryPlan, Work, make_plan
from coserve.memory.profile import Profile, TrainingPeaks, load_profile, measure, save_profile
from coserve.model.base import Base
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.types import LoraSettings, TrainingSettings

RANK = 16
SEQUENCE = 512
"""Longest sequence of the micro-batches; attention takes no memory that grows faster than tokens."""
WARM_UP = 16


@dataclass(frozen=True)
class Conditions:
    """What a profile depends on, besides the base, the GPU and torch."""

    way: Way
    recompute: bool
    max_running: int
    page_tokens: int
    work: Work


def plan_memory(base: Base, conditions: Conditions, *, fraction: float, path: Path) -> MemoryPlan:
    """What `fraction` of the base's GPU leaves for pages. Measured at the first start, and kept at `path` for the next.

    Raises:
        UnsupportedBase: a base that cannot be trained layer by layer.
        ConfigError: see `make_plan`.
    """
    key = _key(base, conditions)
    profile = load_profile(path, key)
    if profile is None:
        profile = _measured(base, conditions)
        save_profile(path, key, profile)
    gc.collect()
    torch.cuda.empty_cache()
    CudaMeter(base.device).reset()  # what was tried does not count as what was needed
    free, total = torch.cuda.mem_get_info(base.device)
    page_tokens, work = conditions.page_tokens, conditions.work
    page_bytes = page_layout(base.kv_shapes, page_tokens, base.dtype).page_bytes
    least = -(-work.step_tokens // page_tokens)
    return make_plan(Gpu(total, free), fraction, profile, work, page_bytes=page_bytes, least=least)


def _measured(base: Base, conditions: Conditions) -> Profile:
    work = conditions.work
    measures = OnDevice(base, CudaMeter(base.device), conditions)
    return measure(measures, step_tokens=work.step_tokens, micro_batch_tokens=work.micro_batch_tokens)


def _key(base: Base, conditions: Conditions) -> tuple[str, ...]:
    where = (torch.cuda.get_device_name(base.device), str(torch.__version__))  # a str of its own kind
    return (base.spec.fingerprint, base.spec.dtype, *where, repr(conditions))


class Meter(Protocol):
    """Bytes that torch has allocated on a device. All wait for the device first."""

    def now(self) -> int: ...
    def peak(self) -> int:
        """The most since `reset`."""
        ...

    def reset(self) -> None: ...


class CudaMeter:
    """`Meter` of a GPU."""

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
def undisturbed() -> Iterator[None]:
    """Nothing of before is freed inside: it would count as memory that what is measured gave back."""
    gc.collect()
    with gc_paused():
        yield


class OnDevice:
    """`memory.profile.Measures` of a base: kernels were compiled and workspaces made ahead of the first call."""

    def __init__(self, base: Base, meter: Meter, conditions: Conditions) -> None:
        """Raises `UnsupportedBase` for a base that cannot be trained layer by layer."""
        self._base, self._meter = base, meter
        self._way, self._page_tokens = conditions.way, conditions.page_tokens
        self._chosen, self._rows = conditions.max_running, conditions.max_running + SCORED_TOKENS
        self._stepper = Stepper(base, recompute=conditions.recompute)
        self.step(WARM_UP)
        self.micro_batch(WARM_UP)

    @undisturbed()
    @torch.no_grad()
    def step(self, tokens: int) -> int:
        """A step of `tokens` tokens of one adapter, with as many rows of logits as a step may have: those of
        `max_running` sequences, of which tokens are chosen in fp32, and those of scored prompts."""
        base = self._base
        kv = KvCache.for_base(base, tokens, self._page_tokens)
        pages = kv.take(kv.pages_for(tokens))
        assert pages is not None, "the cache was made for them"
        batch = LoraBatch(Segments((0, tokens), (0,)), (cast(self._adapter(), base.dtype),), self._way)
        tokens_T, positions_T = self._tokens(tokens), torch.arange(tokens, device=base.device) % base.spec.context
        keep = torch.arange(self._rows, device=base.device) % tokens
        self._meter.reset()
        before = self._meter.now()
        attention = kv.attention([Run(tokens, 0, tuple(pages))])
        logits_KV = base.forward(tokens_T, positions_T, attention, lora=batch, keep=keep)
        logits_KV[: self._chosen].float().log_softmax(-1)
        return self._meter.peak() - before

    @undisturbed()
    def micro_batch(self, tokens: int) -> TrainingPeaks:
        """A micro-batch of `tokens` tokens, of which all but each sequence's first are learned, and the update."""
        base, empty = self._base, self._meter.now()
        learner = Learner(self._adapter(), base.spec, TrainingSettings(steps=1), base.dtype)
        learner.update(targets=1, learning_rate=0.0)  # makes the moments
        job = self._meter.now() - empty
        rows = self._packed(tokens)
        lora = LoraBatch(Segments((0, tokens), (0,)), (learner.weights(),), self._way)
        self._meter.reset()
        before = self._meter.now()
        micro_steps = self._stepper.learn(rows, lora, learner.leaves, learner.grads)
        for _ in base.layers:
            next(micro_steps)
        forward = self._meter.peak() - before
        run_to_end(micro_steps)
        learner.update(targets=max(1, rows.targets), learning_rate=0.0)
        return TrainingPeaks(forward=forward, whole=self._meter.peak() - before, job=job)

    def _adapter(self) -> LoraWeights:
        settings = LoraSettings(r=RANK)
        return new_adapter(settings, self._base.spec, seed=0, dtype=torch.float32, device=self._base.device)

    def _tokens(self, tokens: int) -> Tensor:
        return torch.arange(tokens, device=self._base.device) % self._base.spec.vocab

    def _packed(self, tokens: int) -> PackedRows:
        longest = min(SEQUENCE, self._base.spec.context)
        bounds = (*range(0, tokens, longest), tokens)
        place_T = torch.arange(tokens, device=self._base.device)
        learned_K = place_T[place_T % longest > 0]
        tokens_T = self._tokens(tokens)
        return PackedRows(tokens_T, place_T % longest, bounds, learned_K - 1, tokens_T[learned_K])
