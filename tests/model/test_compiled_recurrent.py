"""Compiled training layers of bases some of whose layers keep a recurrent state, against the base's own layers and
autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from coserve.core.types import LoraSettings
from coserve.data.corpus.batch import corpus_batch
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.memory_limits import StepRecompute
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.packed_rows import pack_jobs
from coserve.kernels.lora.segments import Segments
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.packed import PackedRecurrence
from coserve.model.base import Base, wrap_base
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraBatch
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.model.training.trace import Compile, inductor
from tests.support.examples import in_turns, on_days
from tests.support.families import tiny_family
from tests.support.finetuning import CPU, random_corpus, started
from tests.support.gpu_memory import COSTS
from tests.support.interpreted import interpreted
from tests.support.layer_graphs import RepeatingRecorder
from tests.support.lora_backends import SEGMENTED

LENGTHS = (70, 2, 1, 5)
CORPUS = random_corpus(lengths=LENGTHS)
"""A row longer than a chunk of a recurrence, and rows shorter than a convolution."""
TARGETS = ("in_proj", "in_proj_qkv", "out_proj", "q_proj", "down_proj")
SHAPES: dict[str, dict[str, object]] = {
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "olmo_hybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"]},
    "falcon_h1": {"num_hidden_layers": 1},
    "jamba": {"num_hidden_layers": 2, "expert_layer_offset": 5},
    "lfm2": {},
}


def base_of(family: str) -> Base:
    return wrap_base(tiny_family(family, **SHAPES[family]), name=family)


def compiled_of(base: Base, compile: Compile) -> CompiledLayers:
    layers = CompiledLayers(base, LayerCut(base), compile, costs=lambda: COSTS)
    layers.compile()
    return layers


@cache
def compiled(family: str) -> tuple[Base, CompiledLayers]:
    """A base, and its layers with cuts that keep less."""
    base = base_of(family)
    layers = compiled_of(base, interpreted)
    layers.compile_levels(COSTS)
    return base, layers


def gradients(
    base: Base,
    layers: CompiledLayers | None,
    rows: Sequence[int],
    *,
    graphs: LayerGraphs | None = None,
    **counts: int,
) -> list[Tensor]:
    """The loss's sums and all gradients of a packed batch of these rows."""
    targets = tuple(name for name in TARGETS if any(site.endswith(f".{name}") for site in base.spec.sites))
    optimizer, tokens = started(base, LoraSettings(r=8, alpha=16, targets=targets)), sum(LENGTHS[row] for row in rows)
    packed = pack_jobs([corpus_batch(CORPUS, rows)], CPU, graphs.padded_size(tokens) if graphs else 0)
    lora = LoraBatch(Segments((0, packed.tokens), (0,)), (optimizer.weights(),), SEGMENTED)
    runner = MicroBatchRunner(base, recompute=False, compiled=layers, graphs=graphs)
    sums = run_to_end(
        runner.forward_backward(packed, lora, optimizer.trainable, optimizer.grads, how=StepRecompute(**counts))
    )
    return [sums, *(one for layer in optimizer.grads for one in layer)]


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=5e-4, atol=5e-5)


@pytest.mark.parametrize("family", in_turns([*SHAPES], ["qwen3_5_text"]))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_gradients_are_those_of_autograd(family: str) -> None:
    """Of rows that share a batch, whatever layers keep."""
    base, layers = compiled(family)
    expected = gradients(base, None, range(4))
    for counts in ({}, {"partly": 1, "recomputed": len(base.layers) - 1}):
        close(gradients(base, layers, range(4), **counts), expected)
    assert not layers.notes, "none was refused"


@pytest.mark.parametrize("family", in_turns([*SHAPES], ["qwen3_5_text"]))
@pytest.mark.filterwarnings("ignore")
def test_graphs_serve_rows_of_other_lengths(family: str) -> None:
    """Batches of as many tokens with their padding."""
    (base, layers), recorder = compiled(family), RepeatingRecorder()
    graphs = LayerGraphs(layers, lambda: recorder, least_step=16)
    for rows in ((0,), (0, 3), (0, 2), (1, 0, 3), (0, 1)):
        close(gradients(base, layers, rows, graphs=graphs), gradients(base, layers, rows))
    assert recorder.recorded == 2 * len(base.layers) and recorder.replayed == 3 * recorder.recorded


@pytest.mark.filterwarnings("ignore")
def test_a_recurrence_is_given_back_what_its_forward_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever layers keep: if the backward runs the forward again, what that one kept."""
    base, layers = compiled("qwen3_5_text")
    expected = gradients(base, None, range(4))
    kept, given_back = list[Tensor](), list[Tensor]()

    def recur_keeping(self: PackedRecurrence, given: RecurrenceInputs) -> tuple[Tensor, Tensor]:
        kept.append(torch.full((), float(len(kept))))
        return self.recur(0, given), kept[-1]

    computed = PackedRecurrence.gradients

    def backward(self: PackedRecurrence, given: RecurrenceInputs, dout: Tensor, own: Tensor | None) -> list[Tensor]:
        assert own is not None
        given_back.append(own)
        return computed(self, given, dout)

    monkeypatch.setattr(PackedRecurrence, "recur_keeping", recur_keeping)
    monkeypatch.setattr(PackedRecurrence, "gradients", backward)
    for counts, times in (({}, 1), ({"partly": 2}, 1), ({"recomputed": 2}, 2)):
        kept.clear(), given_back.clear()
        close(gradients(base, layers, range(4), **counts), expected)
        assert len(kept) == times and given_back == kept[-1:]


@on_days(4)
@pytest.mark.filterwarnings("ignore")
def test_rows_of_a_batch_learn_what_they_learn_alone() -> None:
    """With the real compiler."""
    base = base_of("qwen3_5_text")
    layers = compiled_of(base, inductor)
    together = gradients(base, layers, range(3))
    alone = [gradients(base, layers, [row]) for row in range(3)]
    close(together, [torch.stack(own).sum(0) for own in zip(*alone, strict=True)])
    close(together, gradients(base, None, range(3)))
