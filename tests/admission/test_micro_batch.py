"""Predicted bytes are those that live at a time: torch's own storages, counted on fake tensors as on a GPU, of any
adapter."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from coserve.admission.micro_batch import ROWS, MicroBatchBytes, MicroBatchShape, lora_layers, micro_batch_bytes
from coserve.admission.shapes import SiteShape, job_state_bytes, lora_shapes, role_of
from coserve.core.gpu_memory import TrainingCosts
from coserve.core.training.settings import DpoLoss, TrainingSettings
from coserve.core.types import BaseSpec, LoraSettings
from coserve.finetune.init import zero_adapter
from coserve.finetune.losses.loss import Loss
from coserve.finetune.memory_limits import StepRecompute
from coserve.finetune.memory_profiling import Conditions, MemoryProfiler
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.kernels.lora.segments import Segments
from coserve.memory.plan import Work
from coserve.model.base import Base, wrap_base
from coserve.model.groups import share_inputs
from coserve.model.lora import LoraBatch
from tests.support import predicted_memory as predicted
from tests.support.examples import examples, marks_on_days
from tests.support.live_bytes import LiveBytes

BACKEND = predicted.FakeSegmentedBackend()
TOKENS = 512
LLAMA = LlamaConfig(
    hidden_size=512,
    intermediate_size=1792,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=32000,
    max_position_embeddings=2048,
)
GPT2 = GPT2Config(n_embd=512, n_layer=2, n_head=8, vocab_size=9000, n_positions=2048, bos_token_id=1, eos_token_id=2)


@dataclass
class Measured:
    """A base whose micro-batches run on fake tensors."""

    base: Base
    meter: LiveBytes
    profiler: MemoryProfiler
    costs: TrainingCosts

    @property
    def spec(self) -> BaseSpec:
        return self.base.spec

    def bytes(self, shapes: Iterable[SiteShape], batch: MicroBatchShape, *, dropout: bool = False) -> MicroBatchBytes:
        layers = lora_layers(self.costs, shapes, self.spec.dtype, dropout=dropout)
        return micro_batch_bytes(self.costs, self.spec, layers, batch)

    def error(self, lora: LoraSettings, tokens: int, *, recomputed: int, positions: int | None) -> float:
        """Of the predicted peak, relative to the counted one. What the job keeps must be exact."""
        assert lora.targets is not None
        found = self.profiler.phases(
            tokens, recomputed=recomputed, targets=lora.targets, rank=lora.r, positions=positions
        )
        shapes = lora_shapes(lora, self.spec)
        kept = job_state_bytes(shapes, self.spec.dtype, early_stopping=False)
        assert kept.total == pytest.approx(found.job, abs=512), "the count of steps, a scalar"
        own = self.bytes(shapes, MicroBatchShape(tokens, found.positions, recomputed))
        assert own.kept >= found.kept
        return (own.peak - ROWS * tokens) / max(found.head, found.backward) - 1


def measured(config: PretrainedConfig) -> Iterator[Measured]:
    with predicted.fake_tensors() as meter:
        base = wrap_base(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), name="tiny")
        share_inputs(base)
        conditions = Conditions(BACKEND, False, 4, 16, Work(64, TOKENS, 1))
        profiler = MemoryProfiler(base, meter, conditions, attention=predicted.FlashAttention, updates=False)
        yield Measured(base, meter, profiler, profiler.costs(TOKENS))


TARGETS = {
    "gpt2": (("c_attn",), ("mlp.c_proj",), ("attn.c_proj", "c_fc")),
    "llama": (("q_proj", "v_proj"), ("down_proj",), ("q_proj", "down_proj")),
}
"""Of adapters of each base."""
TOP_SITE = {"gpt2": "transformer.h.1.mlp.c_proj", "llama": "model.layers.1.mlp.down_proj"}


@pytest.fixture(scope="module", params=[GPT2, pytest.param(LLAMA, marks=marks_on_days(3))], ids=["gpt2", "llama"])
def base(request: pytest.FixtureRequest) -> Iterator[Measured]:
    yield from measured(request.param)


@pytest.mark.parametrize(
    ("at", "rank", "tokens", "recomputed", "positions"),
    [(0, 64, 1024, 0, None), (1, 8, 700, 2, 20), (0, 32, 900, 1, 400), (2, 128, 300, 0, 100)],
)
def test_other_adapters_than_the_measured_one(
    base: Measured, at: int, rank: int, tokens: int, recomputed: int, positions: int | None
) -> None:
    lora = LoraSettings(r=rank, targets=TARGETS[base.spec.family][at])
    assert abs(base.error(lora, tokens, recomputed=recomputed, positions=positions)) < 0.01


@pytest.mark.slow
def test_an_adapter_of_the_upper_layer_alone_keeps_nothing_below(base: Measured) -> None:
    targets = tuple(name for name in base.spec.sites if ".1." in name)
    assert abs(base.error(LoraSettings(r=16, targets=targets), 600, recomputed=0, positions=None)) < 0.02


@pytest.mark.parametrize("recomputed", [0, 2])
@pytest.mark.parametrize("top", [False, True])
def test_pairs_of_a_dpo_loss_take_no_more_than_predicted(base: Measured, top: bool, recomputed: int) -> None:
    """The reference's forward and head included, which come first."""
    spec, meter, bounds = base.spec, base.meter, (0, 200, 512, 700, 1024)
    targets = (TOP_SITE[spec.family],) if top else TARGETS[spec.family][2]
    lora, tokens = LoraSettings(r=16, targets=targets), bounds[-1]
    start = zero_adapter(lora, spec, dtype=torch.float32, device=base.base.device)
    optimizer = AdapterOptimizer(start, spec, TrainingSettings(), torch.bfloat16)
    del start
    index_T = torch.arange(tokens)
    lengths = [end - start for start, end in pairwise(bounds)]
    keep_K = torch.tensor([i for i in range(tokens - 1) if i + 1 not in bounds])
    rows = PackedRows(
        index_T,
        index_T % 512,
        bounds,
        keep_K,
        keep_K,
        sequence_targets=tuple(length - 1 for length in lengths),
        sequences_T=torch.repeat_interleave(torch.arange(4), torch.tensor(lengths), output_size=tokens),
    )
    batch = LoraBatch(Segments((0, tokens), (0,)), (optimizer.weights(),), BACKEND)
    runner = MicroBatchRunner(base.base, recompute=False, attention=predicted.FlashAttention)
    meter.reset()
    before = meter.now()
    loss, how = Loss(preference=DpoLoss(beta=0.1)), StepRecompute(recomputed)
    run_to_end(runner.forward_backward(rows, batch, optimizer.trainable, optimizer.grads, loss, how))
    counted = meter.peak() - before
    asked = MicroBatchShape(tokens, rows.targets, recomputed, pairs=True)
    expected = base.bytes(lora_shapes(lora, spec), asked).peak - ROWS * tokens
    assert 0.97 * expected < counted <= expected


@pytest.mark.slow
def test_random_adapters(base: Measured) -> None:
    rng, names = random.Random(3), base.spec.default_targets
    for _ in range(examples(12)):
        lora = LoraSettings(
            r=rng.choice((4, 8, 16, 32, 64)), targets=tuple(rng.sample(names, rng.randint(1, len(names))))
        )
        tokens, recomputed = rng.randint(128, 2048), rng.choice((0, 0, 1, 2))
        error = base.error(lora, tokens, recomputed=recomputed, positions=rng.choice((None, 20, tokens // 3)))
        assert abs(error) < 0.03, (lora, tokens, recomputed)


def test_a_cartridge_takes_no_less_than_its_keys_and_values(base: Measured) -> None:
    """In each layer those that rows of 64 tokens attend to, their own included."""
    sites, element = base.spec.prefixes, base.base.dtype.itemsize
    shapes = lora_shapes(LoraSettings(r=256, cartridge=True), base.spec)
    found = base.bytes(shapes, MicroBatchShape(512, 100))
    width = next(iter(sites.values())).in_features
    assert found.kept >= len(sites) * 512 // 64 * (256 + 64) * 2 * width * element


def test_roles_are_names_within_a_layer() -> None:
    assert role_of("model.layers.11.self_attn.q_proj") == "self_attn.q_proj"
    assert role_of("transformer.h.0.mlp.c_proj") == "mlp.c_proj"
    assert role_of("model.layers.3.mlp.experts.7.up_proj") == "mlp.experts.7.up_proj"


def test_recomputation_and_fewer_tokens_take_less(base: Measured) -> None:
    shapes = lora_shapes(LoraSettings(r=16), base.spec)
    batches = (MicroBatchShape(2048, 2000), *(MicroBatchShape(4096, 4000, layers) for layers in (0, 1, 2, 3)))
    half, whole, one, both, more = (base.bytes(shapes, batch) for batch in batches)
    assert half.peak < whole.peak
    assert both.peak < whole.peak and one.peak <= whole.peak
    assert both.kept < one.kept < whole.kept
    assert more == both, "there are two"


def test_a_teacher_and_dropout_take_more(base: Measured) -> None:
    shapes = lora_shapes(LoraSettings(r=16), base.spec)
    plain, taught, dropped = (
        base.bytes(shapes, MicroBatchShape(1024, 1000, teacher=teacher), dropout=dropout)
        for dropout, teacher in ((False, False), (False, True), (True, False))
    )
    assert taught.kept > plain.kept
    assert dropped.kept > plain.kept
