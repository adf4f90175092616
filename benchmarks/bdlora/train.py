"""Optimizer steps of one LoRA, by the trainer's own parts: compiled layers in CUDA graphs, as the daemon runs them."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.gpu.capture import TRAINING_PRIORITY
from coserve.kernels.gpu.graph_memory import GraphMemory
from coserve.kernels.lora.backend import choose_backend
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.layers import LayerCut
from coserve.model.lora import KeptLora, LoraBatch
from coserve.model.parallel.adapter import AdapterPartition
from coserve.model.parallel.lora import Strategy
from coserve.model.training.compiled_layers import CompiledLayers


def compiled_runner(base: Base) -> MicroBatchRunner:
    """On a GPU of compiled layers, with graphs. All ranks of the base call this."""
    if base.device.type != "cuda":
        return MicroBatchRunner(base, recompute=False)
    compiled = CompiledLayers(base, LayerCut(base))
    compiled.compile()
    compiled.forget_examples()
    stream = torch.cuda.Stream(base.device, priority=TRAINING_PRIORITY)  # type: ignore[no-untyped-call]
    make = partial(GraphMemory, stream)
    if base.sharding is not None:
        make = partial(make, held=base.sharding.mesh.traffic.held)
    return MicroBatchRunner(
        base, recompute=False, compiled=compiled, graphs=LayerGraphs(compiled, make, ranks=base.sharding is not None)
    )


def train_steps(
    base: Base, runner: MicroBatchRunner, rows: int, length: int, *, repeats: int, warm_ups: int
) -> list[float]:
    """Seconds of each step: forward and backward of one micro-batch, and AdamW's update. All ranks of the base call
    this. The second step captures the graphs."""
    settings = LoraSettings(r=16)
    start = new_adapter(settings, base.spec, seed=0, dtype=torch.float32, device=base.device)
    training = TrainingSettings(steps=1)
    cut = None
    if base.sharding is not None:  # the daemon's default strategy, whatever the base's is
        cut = AdapterPartition.of(replace(base.sharding, strategy=Strategy.NFS), start.sites)
    optimizer = AdapterOptimizer(start, base.spec, training, base.dtype, base.device, cut)
    backend, kept, found = choose_backend("auto", base.device, base.dtype), KeptLora(), []
    packed = _packed(base, rows, length)
    assert runner.padded_size(packed.tokens) == packed.tokens, "expected a size that is not filled up"
    for _ in range(warm_ups + repeats):
        began = time.perf_counter()
        optimizer.zero_grad()
        lora = LoraBatch(Segments((0, packed.tokens), (0,)), (optimizer.weights(),), backend, kept=kept)
        sums_12 = run_to_end(runner.forward_backward(packed, lora, optimizer.trainable, optimizer.grads))
        norm = optimizer.divide_grads(packed.targets)
        loss = float(sums_12[0, 0])
        optimizer.update(float(norm), 1e-4)
        if base.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
        assert loss == loss, "expected a finite loss"  # noqa: PLR0124
    return found[warm_ups:]


def _packed(base: Base, rows: int, length: int) -> PackedRows:
    """Rows of one length; all but the first token of each are targets."""
    index_T = torch.arange(rows * length, device=base.device)
    tokens_T, target_K = index_T * 7919 % base.spec.vocab, index_T[index_T % length > 0]
    bounds = tuple(range(0, rows * length + 1, length))
    return PackedRows(tokens_T, index_T % length, bounds, target_K - 1, tokens_T[target_K])
