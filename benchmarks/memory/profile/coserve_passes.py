"""The daemon's forward and backward for profiles: a generation step over prompts, and a fine-tuning micro-batch that is
suspended layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.memory.profile.passes import Passes, settled
from benchmarks.memory.profile.request import Kind, Workload
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.finetune.lora_tensors import named_tensors
from coserve.finetune.memory_profiling import MemoryMeter
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.attention.interface import Attention, TokenRun
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.memory.buffer import page_layout
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.forward_context import running
from coserve.model.groups import share_inputs
from coserve.model.lora import LoraBatch, LoraWeights

PAGE_TOKENS = 16


@dataclass(frozen=True)
class SeamBackends:
    """Implementations of the base's replaceable operations on the device."""

    lora: LoraBackend
    training_attention: Callable[[Sequence[int]], Attention]
    paged_attention: Callable[[KvCache, Sequence[TokenRun]], Attention]
    recompute: bool


class CoserveTrial:
    """Implements `Trial` for a base loaded as the daemon loads it."""

    def __init__(self, base: Base, meter: MemoryMeter, backends: SeamBackends) -> None:
        """Raises `UnsupportedBase` for a base that cannot be trained layer by layer."""
        self._base, self._meter, self._backends = base, meter, backends
        self._runner = MicroBatchRunner(base, recompute=backends.recompute, attention=backends.training_attention)
        if backends.lora.groups_inputs:
            share_inputs(base)
        if base.device.type == "cuda":
            # Workspaces of the GEMMs that checked the base: readings leave them out.
            torch._C._cuda_clearCublasWorkspaces()
        self._loaded = settled(meter)
        self._kv = page_layout(base.kv_shapes, PAGE_TOKENS, base.dtype).page_bytes // PAGE_TOKENS

    @contextmanager
    def workload(self, workload: Workload) -> Iterator[Passes]:
        base, weights = self._base, self._loaded
        match workload.kind:
            case Kind.INFERENCE:
                yield Passes(
                    lambda batch, length: _Case(base, self._backends, batch, length),
                    False,
                    weights,
                    kv_per_token=self._kv,
                )
            case Kind.LORA:
                assert workload.rank is not None, "a LoRA has a rank"
                settings, before = LoraSettings(r=workload.rank, targets=workload.targets), settled(self._meter)
                start = new_adapter(settings, base.spec, seed=0, dtype=torch.float32, device=base.device)
                optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(steps=1), base.dtype)
                del start
                adapter = sum(tensor.nbytes for _, tensor in named_tensors(optimizer.weights()))
                kept = settled(self._meter) - before - adapter
                runner = self._runner
                yield Passes(
                    lambda batch, length: _LoraCase(base, self._backends, batch, length, runner, optimizer),
                    True,
                    weights + adapter,
                    optimizer=kept,
                    kv_per_token=self._kv,
                )
            case Kind.FULL:
                base.model.requires_grad_(True)
                try:
                    yield Passes(
                        lambda batch, length: _FullCase(base, self._backends, batch, length),
                        True,
                        weights,
                        kv_per_token=self._kv,
                    )
                finally:
                    base.model.requires_grad_(False)


class _Case:
    """A generation step over `batch` prompts of `length` tokens. The KV pages are allocated in advance."""

    def __init__(self, base: Base, backends: SeamBackends, batch: int, length: int) -> None:
        self._base, self._backends = base, backends
        self._tokens, self._bounds = batch * length, tuple(range(0, batch * length + 1, length))
        index_T = torch.arange(self._tokens, device=base.device)
        self._tokens_T, self._positions_T = index_T % base.spec.vocab, index_T % length
        self._last_B = torch.arange(length - 1, self._tokens, length, device=base.device)
        tokens = batch * -(-length // PAGE_TOKENS) * PAGE_TOKENS
        self._cache = KvCache.for_base(base, tokens, PAGE_TOKENS, sequences=batch)
        each = self._cache.pages_for(length)
        pages = self._cache.allocate(batch * each)
        assert pages is not None, "the cache was sized for them"
        self._runs = [TokenRun(length, 0, tuple(pages[row * each : (row + 1) * each]), row) for row in range(batch)]

    @torch.no_grad()
    def no_grad(self) -> None:
        base, attention = self._base, self._backends.paged_attention(self._cache, self._runs)
        with running(base.prepare(self._adapter())):
            logits_BV = base.run(self._tokens_T, self._positions_T, attention, self._last_B)
        logits_BV.float().log_softmax(-1)

    def train(self) -> Iterator[None]:
        raise AssertionError("inference has no backward")

    def _adapter(self) -> LoraBatch | None:
        return None


class _LoraCase(_Case):
    """The same step with one adapter, and a micro-batch that trains it: all tokens but the first of each row are
    targets."""

    def __init__(
        self,
        base: Base,
        backends: SeamBackends,
        batch: int,
        length: int,
        runner: MicroBatchRunner,
        optimizer: AdapterOptimizer,
    ) -> None:
        super().__init__(base, backends, batch, length)
        self._runner, self._optimizer = runner, optimizer
        target_K = torch.arange(batch * (length - 1), device=base.device) % base.spec.vocab
        self._rows = PackedRows(self._tokens_T, self._positions_T, self._bounds, target_K % self._tokens, target_K)

    def train(self) -> Iterator[None]:
        optimizer = self._optimizer
        steps = self._runner.forward_backward(
            self._rows, self._batch(optimizer.weights()), optimizer.trainable, optimizer.grads
        )
        for _ in self._base.layers:
            next(steps)
        yield
        run_to_end(steps)

    def _adapter(self) -> LoraBatch:
        weights = self._optimizer.weights()
        pairs = {
            site: replace(pair, a_RD=pair.a_RD.detach(), b_OR=pair.b_OR.detach(), main_grads=None)
            for site, pair in weights.sites.items()
        }
        return self._batch(LoraWeights(weights.settings, pairs))

    def _batch(self, weights: LoraWeights) -> LoraBatch:
        return LoraBatch(Segments((0, self._tokens), (0,)), (weights,), self._backends.lora)


class _FullCase(_Case):
    """The same step, and the model's own forward over packed rows with all weights trained: one autograd graph over the
    sum of all logits."""

    def train(self) -> Iterator[None]:
        base = self._base
        attention = self._backends.training_attention(self._bounds)
        logits: Tensor = base.run(self._tokens_T, self._positions_T, attention, None)
        yield
        logits.sum().backward()  # type: ignore[no-untyped-call]
        for parameter in base.model.parameters():
            parameter.grad = None
