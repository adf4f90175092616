"""Training layers that inductor compiled for the GPU, against the base's own layers and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base, wrap_base
from coserve.model.layers import LayerCut
from coserve.model.load import load_base
from coserve.model.lora import LoraBatch
from coserve.model.parallel.mesh import LoneRank
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.families import tiny_family
from tests.support.finetuning import pack_rows, random_corpus
from tests.support.lora_backends import SEGMENTED
from tests.support.sharded import save_base
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

CORPUS = random_corpus(lengths=(90, 33, 7, 64))
DEVICE = torch.device("cuda", 0)
ROWS = (((0, 1, 2, 3), False), ((2,), False), ((3, 1), True))
"""Rows of a micro-batch, and whether their layers are recomputed."""


def gradients(base: Base, compiled: CompiledLayers | None, rows: Sequence[int], *, recompute: bool) -> list[Tensor]:
    start = new_adapter(LoraSettings(r=16), base.spec, seed=3, dtype=torch.float32, device="cuda")
    for pair in start.sites.values():
        pair.b_OR.normal_(std=0.05, generator=torch.Generator("cuda").manual_seed(1))
    optimizer = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype, partition=base.partition(start))
    packed = pack_rows(CORPUS, rows, DEVICE)
    lora = LoraBatch(Segments((0, packed.tokens), (0,)), (optimizer.weights(),), SEGMENTED)
    runner = MicroBatchRunner(base, recompute=recompute, compiled=compiled)
    sums = run_to_end(runner.forward_backward(packed, lora, optimizer.trainable, optimizer.grads))
    return [sums, *(each for layer in optimizer.grads for each in layer)]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradients_are_those_of_autograd(family: str) -> None:
    """gemma2: a soft cap, which attention computes sequence by sequence."""
    equal_gradients(wrap_base(tiny_model(family).to(DEVICE, torch.bfloat16), name=family))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5_text", {}),
        ("granitemoehybrid", {"num_local_experts": 0}),
        ("nemotron_h", {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"]}),
        ("lfm2", {}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_gradients_of_layers_with_a_recurrent_state(family: str, options: dict[str, object]) -> None:
    """A row longer than a chunk of the recurrence. In bfloat16 some gradients of so small a model are wrong by half, so
    the compiled layers' must be as near to float32's as autograd's are."""
    model = tiny_family(family, **options).to(DEVICE, torch.bfloat16)
    exact, base = wrap_base(deepcopy(model).float(), name=family), wrap_base(model, name=family)
    compiled = CompiledLayers(base, LayerCut(base))
    compiled.compile()
    for rows, recompute in ROWS:
        right = gradients(exact, None, rows, recompute=recompute)
        plain = mean_error(gradients(base, None, rows, recompute=recompute), right)
        assert mean_error(gradients(base, compiled, rows, recompute=recompute), right) < 1.5 * plain + 0.02


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {}),
        ("lfm2_moe", {}),
        # so many that the backward reads the maximum and the sum of the router's softmax
        ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_layers_with_experts_are_compiled(family: str, options: dict[str, object]) -> None:
    """They are compared with the layers themselves. Gradients of a whole model are not, as rounding may send a token to
    another expert."""
    base = wrap_base(tiny_family(family, **options).to(DEVICE, torch.bfloat16), name=family)
    layers = CompiledLayers(base, LayerCut(base))
    layers.compile()
    assert layers.ready


@pytest.mark.parametrize("strategy", ["nfs", "slora"])
def test_gradients_of_a_rank_without_the_others(tmp_path: Path, strategy: str) -> None:
    """Its collectives return its own term, with compiled layers and without."""
    folder, mesh = save_base(tmp_path), LoneRank(1, 2)
    equal_gradients(load_base(folder, device="cuda", dtype="bfloat16", mesh=mesh, strategy=strategy))


def equal_gradients(base: Base) -> None:
    compiled = CompiledLayers(base, LayerCut(base))
    compiled.compile()
    for rows, recompute in ROWS:
        expected = gradients(base, None, rows, recompute=recompute)
        found = gradients(base, compiled, rows, recompute=recompute)
        for own, right in zip(found, expected, strict=True):
            assert float((own - right).norm() / right.norm().clamp_min(1e-6)) < 0.08


def mean_error(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the mean of the tensors' relative errors."""
    errors = [float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in zip(found, right, strict=True)]
    return sum(errors) / len(errors)
