"""What the cut into layers costs: the trainer's micro-batch against one forward and one backward of the whole model.

Both run the same layers, LoRA sites, kernels, attention and head, whose loss is computed chunk by chunk; only one of
them has an autograd graph of its own for each layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common.timing import synchronize
from benchmarks.ets.figure_5_1_trainer import random_corpus, training_settings
from benchmarks.finetuning.cases import RANK, SEED, Case, Shape
from benchmarks.finetuning.ours import REPEATS, backend_of
from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.finetune.losses.chunked import Likelihood, target_chunks
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.backend import make_backend
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.forward_context import running
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraBatch
from tests.support.finetuning import pack_rows


class BothWays:
    """Forward and backward of one batch, with and without the cut."""

    def __init__(self, base: Base, shape: Shape, case: Case) -> None:
        settings = LoraSettings(r=RANK, targets=shape.targets)
        start = new_adapter(settings, base.spec, seed=SEED, dtype=torch.float32, device=base.device)
        training = training_settings(0, case.rows, case.length)
        self.optimizer = AdapterOptimizer(start, base.spec, training, base.dtype)
        corpus = random_corpus(shape.vocab, case.rows, case.length, 0)
        self._rows: PackedRows = pack_rows(corpus, range(case.rows), base.device)
        self._base, self._cut, self._backend = base, LayerCut(base), make_backend(backend_of(base))
        self._runner = MicroBatchRunner(base, recompute=False)

    def _lora(self) -> LoraBatch:
        return LoraBatch(Segments((0, self._rows.tokens), (0,)), (self.optimizer.weights(),), self._backend)

    def in_layers(self) -> Tensor:
        """As the daemon trains; the sums as of `MicroBatchRunner.forward_backward`."""
        steps = self._runner.forward_backward(self._rows, self._lora(), self.optimizer.trainable, self.optimizer.grads)
        return run_to_end(steps)

    def whole(self) -> Tensor:
        """One graph. The same sums."""
        rows, cut, optimizer = self._rows, self._cut, self.optimizer
        inputs = cut.embed(rows.tokens_T, rows.positions_T, PackedAttention(rows.bounds))
        context = self._base.prepare(self._lora())
        h_1TD = inputs.h_1TD
        with torch.enable_grad(), running(context):
            for layer in range(len(self._base.layers)):
                h_1TD = cut.layer(layer, h_1TD, inputs)
        loss, gradient_1TD = Likelihood(rows, rows.job_targets, None), torch.zeros_like(h_1TD)
        for chunk in target_chunks(rows, self._runner.targets_at_once):
            leaf_1KD = h_1TD[:, chunk.keep_K].detach().requires_grad_()
            with torch.enable_grad():
                logits_KV = cut.head(leaf_1KD, inputs, chunk.keep_K, gather=False)
            loss.add(logits_KV.detach(), chunk)
            gradient_1TD[:, chunk.keep_K] = torch.autograd.grad(logits_KV, leaf_1KD, logits_KV.detach())[0]
        sums = loss.finish(gradient_1TD)
        anchor = None if context.lora is None else context.lora.anchor
        if anchor is not None:  # the kernels add to the sums themselves
            torch.autograd.grad(h_1TD, [anchor], gradient_1TD, allow_unused=True)
            return sums
        tensors = [tensor for layer in optimizer.trainable for tensor in layer]
        totals = [total for layer in optimizer.grads for total in layer]
        torch._foreach_add_(totals, list(torch.autograd.grad(h_1TD, tensors, gradient_1TD)))
        return sums


def cut_cost(base: Base, shape: Shape, case: Case) -> list[float]:
    """Of each repeat: the time that the cut adds, as a share of the whole model's."""
    ways = BothWays(base, shape, case)

    def seconds(way: Callable[[], object]) -> float:
        synchronize(base.device)
        began = time.perf_counter()
        way()
        synchronize(base.device)
        return time.perf_counter() - began

    for way in (ways.in_layers, ways.whole) * 2:
        way()
    return [seconds(ways.in_layers) / seconds(ways.whole) - 1 for _ in range(2 * REPEATS)]
