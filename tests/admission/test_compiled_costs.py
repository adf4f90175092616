"""Predicted bytes of compiled layers are those that live at a time: torch's own storages, counted while the layers run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from coserve.admission.micro_batch import ROWS, MicroBatchShape, lora_layers, micro_batch_bytes
from coserve.admission.shapes import lora_shapes
from coserve.engine.profiling import predicted
from coserve.engine.profiling.live_bytes import LiveBytes
from coserve.finetune.memory_profiling import Conditions, MemoryProfiler
from coserve.finetune.training_costs import Phases
from coserve.gpu_memory import TrainingCosts
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.gpu.launcher import launch_nothing
from coserve.memory.plan import Work
from coserve.model.base import Base, wrap_base
from coserve.model.layers import LayerCut
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.model.training.running_pass import RunningPass
from coserve.model.training.trace import interpreted
from coserve.types import LoraSettings

BACKEND, TOKENS = predicted.FakeSegmentedBackend(), 192
CONFIG = LlamaConfig(
    hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=1000, max_position_embeddings=1024,
)  # fmt: skip


def counting(seam: Callable[..., Any], meter: LiveBytes) -> Callable[..., Any]:
    """What an opaque op does, counted too: torch shows a dispatch mode its outputs only."""

    @wraps(seam)
    def run(*args: object) -> object:
        with meter:
            return seam(*args)

    return run


def attend_keeping(
    self: PackedAttention, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: object
) -> tuple[Tensor, Tensor]:
    """Sizes of a GPU's kernel for packed sequences."""
    heads, tokens, width = q_HTD.shape
    return q_HTD.new_empty(tokens, heads, width), q_HTD.new_empty(heads, tokens, dtype=torch.float32)


def gradients(self: PackedAttention, qkv: tuple[Tensor, ...], *given: object) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in qkv)


class Measured:
    """A base whose compiled layers run on the CPU; LoRA's kernels are not launched."""

    def __init__(self, base: Base, layers: CompiledLayers, meter: LiveBytes) -> None:
        conditions = Conditions(BACKEND, False, 4, 16, Work(64, TOKENS, 1))
        self.spec = base.spec
        self.compiled, self.plain = (
            MemoryProfiler(base, meter, conditions, updates=False, compiled=own) for own in (layers, None)
        )
        self.costs: TrainingCosts = self.compiled.costs(TOKENS)

    def phases(self, lora: LoraSettings, tokens: int, recomputed: int) -> Phases:
        return self.compiled.phases(tokens, recomputed=recomputed, targets=lora.targets, rank=lora.r)

    def predict(self, lora: LoraSettings, tokens: int, positions: int, recomputed: int) -> int:
        layers = lora_layers(self.costs, lora_shapes(lora, self.spec), self.spec.dtype, dropout=False)
        batch = MicroBatchShape(tokens, positions, recomputed)
        return micro_batch_bytes(self.costs, self.spec, layers, batch).peak - ROWS * tokens


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    base = wrap_base(AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32), name="tiny")
    layers = CompiledLayers(base, LayerCut(base), interpreted)
    layers.compile()
    with pytest.MonkeyPatch.context() as patch, launch_nothing(), LiveBytes() as meter:
        for name in ("learn", "learn_backward", "attend", "attend_backward"):
            patch.setattr(RunningPass, name, counting(getattr(RunningPass, name), meter))
        patch.setattr(PackedAttention, "attend_keeping", attend_keeping)
        patch.setattr(PackedAttention, "gradients", gradients)
        yield Measured(base, layers, meter)


@pytest.mark.parametrize(
    ("targets", "rank", "tokens", "recomputed"),
    [
        (("q_proj", "down_proj"), 32, 512, 0),
        (("gate_proj", "up_proj"), 16, 300, 1),
        (("q_proj", "k_proj", "v_proj", "o_proj"), 64, 400, 2),
        (("down_proj",), 16, 200, 3),
    ],
)
def test_adapters_of_compiled_layers_take_what_is_predicted(
    measured: Measured, targets: tuple[str, ...], rank: int, tokens: int, recomputed: int
) -> None:
    lora = LoraSettings(r=rank, targets=targets)
    found = measured.phases(lora, tokens, recomputed)
    expected = measured.predict(lora, tokens, found.positions, recomputed)
    counted = max(found.head, found.backward)
    assert abs(expected / counted - 1) < 0.01


def test_they_keep_less_than_the_layers_themselves(measured: Measured) -> None:
    assert measured.compiled.phases(256).kept < 0.8 * measured.plain.phases(256).kept
