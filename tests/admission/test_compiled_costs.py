"""Predicted bytes of compiled layers are those that live at a time: torch's own storages, counted while the layers
run."""

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
from coserve.core.gpu_memory import Kept, LayerTime, TrainingCosts
from coserve.core.types import LoraSettings
from coserve.finetune.costs.training_costs import Phases, measure_levels
from coserve.finetune.memory_profiling import Conditions, MemoryProfiler
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.gpu.launcher import launch_nothing
from coserve.memory.plan import Work
from coserve.model.base import Base, wrap_base
from coserve.model.layers import LayerCut
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.model.training.running_pass import RunningPass
from tests.support import predicted_memory as predicted
from tests.support.interpreted import interpreted
from tests.support.live_bytes import LiveBytes

BACKEND, TOKENS = predicted.FakeSegmentedBackend(), 192
CONFIG = LlamaConfig(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=1000,
    max_position_embeddings=1024,
)


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
        self.costs: TrainingCosts | None = None

    def phases(self, lora: LoraSettings, tokens: int, **counts: int) -> Phases:
        return self.compiled.phases(tokens, targets=lora.targets, rank=lora.r, **counts)

    def error(self, lora: LoraSettings, tokens: int, **counts: int) -> float:
        """Of the predicted peak, relative to the counted one."""
        assert self.costs is not None
        found = self.phases(lora, tokens, **counts)
        layers = lora_layers(self.costs, lora_shapes(lora, self.spec), self.spec.dtype, dropout=False)
        batch = MicroBatchShape(tokens, found.positions, **counts)
        expected = micro_batch_bytes(self.costs, self.spec, layers, batch).peak - ROWS * tokens
        return expected / max(found.head, found.backward) - 1


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Measured, Measured]]:
    """A base's layers, and the same with cuts that keep less."""
    base = wrap_base(AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32), name="tiny")
    plain, lean = (CompiledLayers(base, LayerCut(base), interpreted) for _ in range(2))
    plain.compile()
    lean.compile()
    lean.compile_levels()
    with pytest.MonkeyPatch.context() as patch, launch_nothing(), LiveBytes() as meter:
        for name in ("learn", "learn_backward", "attend", "attend_backward"):
            patch.setattr(RunningPass, name, counting(getattr(RunningPass, name), meter))
        patch.setattr(PackedAttention, "attend_keeping", attend_keeping)
        patch.setattr(PackedAttention, "gradients", gradients)
        found, leveled = Measured(base, plain, meter), Measured(base, lean, meter)
        found.costs = found.compiled.costs(TOKENS)
        stays = {kept: lean.sites_kept(kept) for kept in (Kept.ATTENTION, Kept.INPUT)}
        times = dict.fromkeys(Kept, LayerTime(fixed=1.0, per_row_token=0.0))
        leveled.costs = measure_levels(leveled.compiled.phases, found.costs, base.spec, stays, times, TOKENS)
        yield found, leveled


@pytest.fixture(scope="module")
def measured(both: tuple[Measured, Measured]) -> Measured:
    return both[0]


@pytest.fixture(scope="module")
def leveled(both: tuple[Measured, Measured]) -> Measured:
    return both[1]


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
    assert abs(measured.error(LoraSettings(r=rank, targets=targets), tokens, recomputed=recomputed)) < 0.01


@pytest.mark.parametrize(
    ("targets", "rank", "tokens", "recomputed", "partly"),
    [
        (("q_proj", "down_proj"), 32, 512, 0, 3),
        (("gate_proj", "up_proj"), 16, 300, 1, 1),
        (("q_proj", "k_proj", "v_proj", "o_proj"), 64, 400, 2, 0),
        (("down_proj",), 128, 200, 3, 0),
        (("down_proj",), 16, 600, 1, 2),
        (("o_proj",), 16, 600, 0, 1),
        (("v_proj",), 16, 256, 0, 0),
    ],
)
def test_layers_that_keep_less_take_what_is_predicted(
    leveled: Measured, targets: tuple[str, ...], rank: int, tokens: int, recomputed: int, partly: int
) -> None:
    """Never less. x Aᵀ of sites that were measured and that the adapter does not change make it a little more, on a
    base as small as this."""
    lora = LoraSettings(r=rank, targets=targets)
    assert -0.002 < leveled.error(lora, tokens, recomputed=recomputed, partly=partly) < 0.05


def test_each_level_keeps_less(leveled: Measured) -> None:
    layers, costs = leveled.spec.layers, leveled.costs
    assert costs is not None
    kept = [
        leveled.compiled.phases(256, **counts).kept
        for counts in ({}, {"partly": layers}, {"recomputed": 1, "partly": layers - 1}, {"recomputed": layers})
    ]
    assert kept == sorted(kept, reverse=True)
    attention, input = costs.levels[Kept.ATTENTION], costs.levels[Kept.INPUT]
    hidden = 4 * CONFIG.hidden_size
    assert input.kept == pytest.approx(hidden, rel=0.02)
    sums = 4 * CONFIG.num_attention_heads
    assert attention.kept == pytest.approx(2 * hidden + sums, rel=0.01), "its output is as wide as the hidden states"
    assert attention.shrinks == input.shrinks == (False, False, False, True), "nobody needs down_proj's product again"


def test_they_keep_less_than_the_layers_themselves(measured: Measured) -> None:
    assert measured.compiled.phases(256).kept < 0.8 * measured.plain.phases(256).kept
