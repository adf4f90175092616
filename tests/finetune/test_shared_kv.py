"""Fine-tuning of bases whose last layers read the keys and values of earlier ones: gradients go through these, too, and
through the inputs that each layer gets of its own, against PEFT's of one row at a time."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch

from coserve.core.errors import UnsupportedBase
from coserve.core.types import LoraSettings
from coserve.finetune.init import new_adapter
from coserve.finetune.memory_limits import StepRecompute
from coserve.finetune.micro_batch import MicroBatchRunner, MicroSteps, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.interface import LoraBackend
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraBatch
from coserve.model.training.compiled_layers import CompiledLayers
from coserve.model.wrappers import drop_other_parts
from tests.support.examples import sample
from tests.support.families import VOCAB, tiny_family, tiny_gemma3n
from tests.support.finetuning import CPU, gradient_sums, pack_rows, random_corpus, started
from tests.support.lora_backends import GROUPED, SEGMENTED

FAMILIES = ("gemma3n_text", "gemma4_text")
WORDS = VOCAB - 16
"""The other tokens stand for images and sound in a multimodal model."""
CORPUS, ROWS = random_corpus(), [0, 3, 2]
CORPUS = replace(CORPUS, tokens=CORPUS.tokens % WORDS)
"""Rows that are longer than the window of 5 tokens, too."""
ATTENTION = "model.layers.{}.self_attn.{}".format
LEARNED = {
    "every-site": LoraSettings(r=3, alpha=8),
    "readers-alone": LoraSettings(r=5, alpha=8, targets=(ATTENTION(4, "q_proj"), ATTENTION(5, "o_proj"))),
    "source-at-the-bottom": LoraSettings(r=5, alpha=8, targets=(ATTENTION(2, "v_proj"), ATTENTION(5, "q_proj"))),
    "queries-at-the-bottom": LoraSettings(r=5, alpha=8, targets=(ATTENTION(1, "q_proj"),)),
    "embedding": LoraSettings(r=3, alpha=8, targets=("k_proj", "embed_tokens")),
}
"""What is trained: layers 1 and 2 are sources, 3 to 5 read them."""


def tiny_base(family: str) -> Base:
    return wrap_base(tiny_family(family), name=family)


def micro_steps(runner: MicroBatchRunner, optimizer: AdapterOptimizer, backend: LoraBackend, **how: int) -> MicroSteps:
    rows = pack_rows(CORPUS, ROWS, CPU)
    lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), backend, None)
    return runner.forward_backward(rows, lora, optimizer.trainable, optimizer.grads, how=StepRecompute(**how))


def learned(
    base: Base, settings: LoraSettings, *, backend: LoraBackend = GROUPED, recompute: bool = False, **how: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed NLL, and the gradient of each of the adapter's tensors, by name."""
    optimizer = started(base, settings)
    total = run_to_end(micro_steps(MicroBatchRunner(base, recompute=recompute), optimizer, backend, **how))
    return float(total[0, 0]), gradient_sums(optimizer)


def by_peft(family: str, settings: LoraSettings) -> tuple[float, dict[str, torch.Tensor]]:
    """What `learned` returns, by PEFT."""
    base = tiny_base(family)
    weights = started(base, settings).masters()
    targets = list(settings.targets or base.spec.default_targets)
    model = peft.get_peft_model(
        tiny_family(family), peft.LoraConfig(r=settings.r, lora_alpha=8, target_modules=targets)
    )
    parameters = {}
    for site, pair in weights.sites.items():
        module = model.get_submodule(f"base_model.model.{site}")
        if isinstance(module, peft.tuners.lora.Embedding):
            own = {"a": module.lora_embedding_A["default"], "b": module.lora_embedding_B["default"]}
        else:
            own = {"a": module.lora_A["default"].weight, "b": module.lora_B["default"].weight}
        for part, tensor in (("a", pair.a_RD), ("b", pair.b_OR)):
            own[part].data.copy_(tensor)
            parameters[f"{site}.{part}"] = own[part]
    total = torch.zeros(())
    for row in ROWS:
        tokens, target = (torch.from_numpy(part.astype("int64")) for part in CORPUS.row(row))
        logits = model(input_ids=tokens[None]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        total = total + (losses * target[1:]).sum()
    total.backward()
    return float(total.detach()), {name: one.grad for name, one in parameters.items() if one.grad is not None}


def check(found: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-3)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        largest = float(expected[1][name].abs().max())
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-3, atol=1e-4 * max(1.0, largest), msg=name)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # of tied weights
@pytest.mark.parametrize("family", sample(FAMILIES, "gemma4_text"))
@pytest.mark.parametrize("settings", sample(LEARNED, "every-site", "source-at-the-bottom"))
def test_gradients_equal_pefts(settings: LoraSettings, family: str) -> None:
    """Whether layers keep what their backward needs, run again, or some of each, and where kernels add gradients."""
    expected, base = by_peft(family, settings), tiny_base(family)
    check(learned(base, settings), expected)
    check(learned(base, settings, recompute=True), expected)
    check(learned(base, settings, recomputed=2), expected)
    if "embed_tokens" not in (settings.targets or ()):
        FusedBase(base, compiled=False)
        check(learned(base, settings, backend=SEGMENTED), expected)


@pytest.mark.parametrize("family", sample(FAMILIES, "gemma3n_text"))
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_work_between_the_micro_steps_changes_no_bit(family: str, recompute: bool) -> None:
    """Another job's micro-batch, and a request."""
    base, other = tiny_base(family), LoraSettings(r=2, init="orthogonal")
    served = LoraBatch(
        Segments((0, 12), (0,)), (new_adapter(other, base.spec, seed=1, dtype=torch.float32, device="cpu"),), GROUPED
    )
    runner = MicroBatchRunner(base, recompute=recompute)
    optimizers = [started(base, LoraSettings(r=3, alpha=8)) for _ in range(3)]
    beside = micro_steps(runner, optimizers[0], GROUPED)

    def work() -> None:
        next(beside, None)
        with torch.no_grad():
            base.forward(torch.arange(12), torch.arange(12), PackedAttention((0, 12)), lora=served, keep=None)

    run_to_end(micro_steps(runner, optimizers[1], GROUPED), work)
    run_to_end(micro_steps(runner, optimizers[2], GROUPED))
    between, alone = (gradient_sums(optimizer) for optimizer in optimizers[1:])
    assert all(torch.equal(gradient, alone[name]) for name, gradient in between.items())


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("gemma4_text", {}, "its last layers read the keys and values of earlier ones"),
        ("gemma3n_text", {"num_kv_shared_layers": 0}, "its layers pass on 4 hidden states of a token"),
    ],
)
def test_layers_that_cannot_be_traced_are_not_compiled(family: str, settings: dict[str, object], reason: str) -> None:
    base = wrap_base(tiny_family(family, **settings), name=family)
    cut = LayerCut(base)
    with pytest.raises(UnsupportedBase, match=reason):
        CompiledLayers(base, cut)
    row = torch.arange(7)
    assert cut.embed(row, row, PackedAttention((0, 7))).h_1TD.shape[2] == base.spec.carried, "plans would be wrong"


@pytest.mark.filterwarnings("ignore")
def test_the_text_of_a_multimodal_gemma_3n() -> None:
    """Its logits are those of the text model with the same weights, and it can be trained layer by layer."""
    model, text = tiny_gemma3n(WORDS), tiny_family("gemma3n_text")
    text.load_state_dict(
        {
            name.replace("model.language_model.", "model."): tensor
            for name, tensor in model.state_dict().items()
            if "language_model" in name or "lm_head" in name
        }
    )
    drop_other_parts(model)
    bases = [wrap_base(one, name="gemma3n") for one in (model, text)]
    assert [base.kv_shapes[-1].source for base in bases] == [1, 1]
    tokens = torch.arange(12) * 9 % WORDS
    with torch.no_grad():
        found, expected = (
            base.forward(tokens, torch.arange(12), PackedAttention((0, 12)), lora=None, keep=None) for base in bases
        )
        torch.testing.assert_close(found, expected)
    LayerCut(bases[0])
