"""Compiled training layers against the base's own layers and autograd. The graphs run operation by operation: no compiler."""

from __future__ import annotations

import pytest
import torch

from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.packed_rows import pack_rows
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraBatch
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.model.training.trace import interpreted
from tests.finetune.test_step import CORPUS, CPU, started
from tests.support.finetuning import tiny_base
from tests.support.lora_backends import SEGMENTED

FAMILIES = ("llama", "gpt2", "gemma2")


def compiled_layers(base: Base) -> CompiledLayers:
    layers = CompiledLayers(base, LayerCut(base), interpreted)
    layers.compile()
    return layers


def gradients(base: Base, compiled: CompiledLayers | None, *, recompute: bool = False) -> tuple[torch.Tensor, ...]:
    """The loss's sums and all gradients of three rows."""
    optimizer = started(base)
    rows = pack_rows(CORPUS, [0, 2, 3], CPU)
    runner = MicroBatchRunner(base, recompute=recompute, compiled=compiled)
    lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), SEGMENTED)
    sums = run_to_end(runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads))
    return sums, *(one.clone() for layer in optimizer.grads for one in layer)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_autograd(family: str) -> None:
    base = tiny_base(family)
    expected = gradients(base, None)
    found = gradients(base, compiled_layers(base))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
