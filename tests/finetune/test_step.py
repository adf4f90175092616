"""The suspendable step against PEFT's own forward and torch's own backward."""

from __future__ import annotations

from typing import Any

import msgspec
import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from coserve.core.names import is_rows
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.init import new_adapter
from coserve.finetune.lora_tensors import named_tensors
from coserve.finetune.losses.formulas import perplexity
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.grouped import GroupedBackend, GroupedLora
from coserve.kernels.lora.interface import LoraBackend, PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair
from coserve.lora.files.bdlora import peft_blocks
from coserve.model.base import Base, wrap_base
from coserve.model.dropout import DropoutSpec
from coserve.model.forward_context import current
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from tests.support.examples import sample
from tests.support.finetuning import CPU, SETTINGS, gradient_sums, pack_rows, random_corpus, started, tiny_base
from tests.support.lora_backends import GROUPED, SEGMENTED, lora_of
from tests.support.tiny_models import tiny_model

CORPUS = random_corpus()


def gradients(
    base: Base,
    packs: list[list[int]],
    *,
    settings: LoraSettings = SETTINGS,
    between=None,
    dropout=None,
    lora_backend: LoraBackend = GROUPED,
    **options,
) -> tuple[float, list[torch.Tensor]]:
    """Summed NLL of the micro-batches, and the gradients of the adapter's tensors."""
    optimizer, runner = started(base, settings), MicroBatchRunner(base, **{"recompute": False, **options})
    total = 0.0
    for indices in packs:
        rows = pack_rows(CORPUS, indices, CPU)
        micro_steps = runner.forward_backward(
            rows, lora_of(optimizer.weights(), rows.tokens, lora_backend, dropout), optimizer.trainable, optimizer.grads
        )
        total += float(run_to_end(micro_steps, between)[0, 0])
    optimizer.divide_grads(1)
    return total, [gradient.clone() for layer in [*optimizer.grads, _at_ends(optimizer)] for gradient in layer]


def _at_ends(optimizer: AdapterOptimizer) -> list[torch.Tensor]:
    ends = optimizer.weights().ends
    sums = gradient_sums(optimizer).items()
    return [total for name, total in sums if total.numel() and name.rpartition(".")[0] in ends]


class PeftReference:
    """The same adapter in PEFT, trained one row at a time by plain torch."""

    def __init__(self, family: str, optimizer: AdapterOptimizer) -> None:
        base = tiny_base(family)
        settings = optimizer.weights().settings
        blocks, tokens = peft_blocks(settings, list(optimizer.weights().sites)), settings.trainable_token_indices
        config = peft.LoraConfig(
            r=settings.r,
            lora_alpha=8,
            target_modules=list(base.spec.default_targets if settings.targets is None else settings.targets),
            use_rslora=settings.rslora,
            use_bdlora=None if blocks is None else peft.BdLoraConfig(**blocks),
            use_dora=settings.use_dora,
            trainable_token_indices=tokens and {name: [*own] for name, own in tokens.items()},
            fan_in_fan_out=family == "gpt2",
        )
        self.model = peft.get_peft_model(tiny_model(family), config)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        for site, pair in optimizer.masters().sites.items():
            module = self.model.get_submodule(f"base_model.model.{site}")
            if is_rows(site):
                rows = self.parameters[f"{site}.a"] = module.trainable_tokens_delta["default"]
                torch.testing.assert_close(rows.data, pair.a_RD)
                continue
            if isinstance(module, peft.tuners.lora.Embedding):
                for name, own, tensor in (
                    ("a", module.lora_embedding_A, pair.a_RD),
                    ("b", module.lora_embedding_B, pair.b_OR),
                ):
                    own["default"].data.copy_(tensor)
                    self.parameters[f"{site}.{name}"] = own["default"]
                continue
            for name, layers, tensor in (("a", module.lora_A, pair.a_RD), ("b", module.lora_B, pair.b_OR)):
                layers["default"].weight.data.copy_(tensor)
                self.parameters[f"{site}.{name}"] = layers["default"].weight
            if pair.magnitude_O is not None:
                magnitude = self.parameters[f"{site}.m"] = module.lora_magnitude_vector["default"].weight
                torch.testing.assert_close(magnitude.data, pair.magnitude_O / 1.3)  # PEFT begins with the same
                magnitude.data.copy_(pair.magnitude_O)

    def nll(self, corpus: Corpus, rows: list[int]) -> torch.Tensor:
        total = torch.zeros(())
        for row in rows:
            tokens, target = (torch.from_numpy(part.astype("int64")) for part in corpus.row(row))
            logits = self.model(input_ids=tokens[None]).logits[0]
            losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
            total = total + (losses * target[1:]).sum()
        return total


BD, DORA = msgspec.structs.replace(SETTINGS, bd_blocks=2), msgspec.structs.replace(SETTINGS, use_dora=True)
TOKENS = (9, 3, 70, 31, 44, 25, 100, 7, 50)
"""Trained tokens, not in order."""
LEARNED = {
    "llama": ("llama", SETTINGS),
    "gpt2": ("gpt2", SETTINGS),
    "gemma2": ("gemma2", SETTINGS),
    "qwen3": ("qwen3", SETTINGS),
    "phi": ("phi", SETTINGS),
    "llama-bd": ("llama", BD),
    "llama-bd-attention": ("llama", msgspec.structs.replace(BD, rslora=True, targets=("q_proj", "k_proj", "o_proj"))),
    "qwen3-bd-mlp": ("qwen3", msgspec.structs.replace(BD, bd_blocks=4, targets=("gate_proj", "up_proj", "down_proj"))),
    "phi-bd": ("phi", BD),
    "head": ("llama", msgspec.structs.replace(SETTINGS, targets=("v_proj", "lm_head"))),
    "embedding": ("gemma2", msgspec.structs.replace(SETTINGS, targets=("down_proj", "embed_tokens", "lm_head"))),
    "tokens": (
        "llama",
        msgspec.structs.replace(
            SETTINGS, targets=("v_proj",), trainable_token_indices={"model.embed_tokens": TOKENS, "lm_head": TOKENS[:3]}
        ),
    ),
    "tied-tokens": (
        "gemma3",
        msgspec.structs.replace(
            SETTINGS, targets=("v_proj", "lm_head"), trainable_token_indices={"model.embed_tokens": TOKENS}
        ),
    ),
    "llama-dora": ("llama", DORA),
    "gpt2-dora": ("gpt2", DORA),
    "phi-dora": ("phi", msgspec.structs.replace(DORA, targets=("q_proj", "fc2"))),
}
"""Family and settings."""


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # of tied weights
@pytest.mark.parametrize("case", LEARNED)
def test_loss_and_gradients_equal_pefts(case: str) -> None:
    family, settings = LEARNED[case]
    base = tiny_base(family)
    packs = [[0, 3], [1], [4, 2]]
    total, found = gradients(base, packs, settings=settings)
    optimizer = started(base, settings)
    reference = PeftReference(family, optimizer)
    expected = reference.nll(CORPUS, [0, 3, 1, 4, 2])
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), abs=1e-4)
    names = [name for layer in _names(optimizer) for name in layer]
    for name, gradient in zip(names, found, strict=True):
        torch.testing.assert_close(gradient, reference.parameters[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_dropout_of_dora_is_pefts() -> None:
    """The base's output for the dropped input is scaled, too."""
    base, dropout = tiny_base("llama"), DropoutSpec(0.3, seed=11)
    total, found = gradients(base, [[0]], settings=DORA, dropout=dropout)
    optimizer = started(base, DORA)
    reference = PeftReference("llama", optimizer)
    for site in optimizer.weights().sites:
        module = reference.model.get_submodule(f"base_model.model.{site}")
        module.lora_dropout["default"] = OurMask(dropout, site)
    expected = reference.nll(CORPUS, [0])
    expected.backward()
    assert total == pytest.approx(float(expected.detach()), abs=1e-4)
    names = [name for layer in _names(optimizer) for name in layer]
    for name, gradient in zip(names, found, strict=True):
        torch.testing.assert_close(gradient, reference.parameters[name].grad, rtol=1e-4, atol=1e-5, msg=name)


class OurMask(torch.nn.Module):
    """PEFT's dropout, with the elements that are dropped here."""

    def __init__(self, dropout: DropoutSpec, site: str) -> None:
        super().__init__()
        self.dropout, self.site = dropout, site

    def forward(self, x_1TD: torch.Tensor) -> torch.Tensor:
        return self.dropout.apply(x_1TD[0], self.site)[None]


def _names(optimizer: AdapterOptimizer) -> list[list[str]]:
    weights = optimizer.weights()
    by_tensor = {id(tensor): name for name, tensor in named_tensors(weights)}
    by_tensor |= {id(pair.scale_O): f"{site}.m" for site, pair in weights.sites.items()}
    at_ends = [name for name, _ in named_tensors(weights) if name.rpartition(".")[0] in weights.ends]
    return [*([by_tensor[id(leaf)] for leaf in layer] for layer in optimizer.trainable), at_ends]


@pytest.mark.parametrize(
    "learned",
    sample(
        [("llama", None), ("gpt2", None), ("llama-bd", None), ("llama-bd", 8.0), ("llama-dora", None)],
        ("llama", None),
        ("llama-bd", 8.0),
        ("llama-dora", None),
    ),
    ids=str,
)
def test_five_optimizer_steps_equal_pefts(learned: tuple[str, float | None]) -> None:
    case, ratio = learned
    family, settings = LEARNED[case]
    base = tiny_base(family)
    training = TrainingSettings(learning_rate=0.02, weight_decay=0.1, max_grad_norm=0.5, lora_plus_ratio=ratio)
    optimizer, runner = started(base, settings, training), MicroBatchRunner(base, recompute=False)
    reference = PeftReference(family, optimizer)
    if ratio is None:
        adamw = torch.optim.AdamW(list(reference.parameters.values()), lr=0.02, weight_decay=0.1)
    else:
        options = {"lr": 0.02, "loraplus_lr_ratio": ratio, "loraplus_weight_decay": 0.1}
        adamw = create_loraplus_optimizer(reference.model, torch.optim.AdamW, **options)
    curve, expected_curve = [], []
    for step in range(5):
        indices = [step % 6, (step + 2) % 6, (step + 3) % 6]
        rows = [pack_rows(CORPUS, part, CPU) for part in (indices[:2], indices[2:])]
        targets = sum(part.targets for part in rows)
        nll = sum(
            float(
                run_to_end(
                    runner.forward_backward(
                        part, lora_of(optimizer.weights(), part.tokens), optimizer.trainable, optimizer.grads
                    )
                )[0, 0]
            )
            for part in rows
        )
        optimizer.step(targets=targets, learning_rate=0.02)
        curve.append(nll / targets)
        loss = reference.nll(CORPUS, indices) / targets
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(reference.parameters.values()), 0.5)
        adamw.step()
        expected_curve.append(float(loss.detach()))
    assert curve == pytest.approx(expected_curve, abs=3e-5)
    for name, tensor in named_tensors(optimizer.masters()):
        torch.testing.assert_close(tensor, reference.parameters[name].data, rtol=1e-4, atol=2e-5, msg=name)


def test_micro_batches_add_up_to_the_full_batch() -> None:
    base = tiny_base("llama")
    total, whole = gradients(base, [[0, 1, 2, 3, 4, 5]])
    parts, split = gradients(base, [[0], [5, 2], [1, 3, 4]])
    assert total == pytest.approx(parts, abs=1e-4)
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_wide_head_has_micro_steps_as_short_as_those_of_layers() -> None:
    """With 128,256 tokens, 300 targets' logits in fp32 are two micro-steps: one of all took longer than a token may, so
    that training waited beside requests."""
    base = wrap_base(tiny_model("llama", vocab_size=128_256, hidden_size=16), name="wide")
    corpus = random_corpus(lengths=(301,), learned=2.0)
    optimizer, runner = started(base), MicroBatchRunner(base, recompute=False)
    rows = pack_rows(corpus, [0], CPU)
    kinds = list(
        runner.forward_backward(rows, lora_of(optimizer.weights(), rows.tokens), optimizer.trainable, optimizer.grads)
    )
    assert rows.targets == 300 and kinds.count(MicroStep.HEAD) == 2, kinds


def test_inference_between_the_micro_steps_changes_nothing() -> None:
    base = tiny_base("llama")
    other = new_adapter(LoraSettings(r=2, init="orthogonal"), base.spec, seed=1, dtype=torch.float32, device="cpu")
    tokens, positions = torch.arange(10), torch.arange(10)
    served = lora_of(other, 10)
    seen = []

    def infer() -> None:
        assert torch.is_grad_enabled() and current.context.lora is None, "a suspended micro-step holds a context"
        with torch.no_grad():
            seen.append(base.forward(tokens, positions, PackedAttention((0, 10)), lora=served, keep=None))

    alone = gradients(base, [[0, 1], [2]])
    between = gradients(base, [[0, 1], [2]], between=infer)
    assert alone[0] == between[0]
    assert all(torch.equal(one, other) for one, other in zip(alone[1], between[1], strict=True))
    assert all(torch.equal(logits, seen[0]) for logits in seen)


def test_layers_below_the_lowest_target_have_no_backward() -> None:
    base = tiny_base("llama")
    settings = LoraSettings(r=4, alpha=8, targets=("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"))
    micro_steps = 0

    def count() -> None:
        nonlocal micro_steps
        micro_steps += 1

    for recompute in (False, True):
        micro_steps = 0
        _, found = gradients(base, [[0]], settings=settings, between=count, recompute=recompute)
        assert micro_steps + 1 == len(base.layers) + 1 + 1
        assert len(found) == 4 and all(gradient.abs().sum() > 0 for gradient in found)


def test_perplexities_are_finite_in_single_precision() -> None:
    assert perplexity(0.0) == 1.0 and perplexity(2.0) == pytest.approx(7.389, abs=1e-3)
    assert torch.tensor(perplexity(1e6), dtype=torch.float32).isfinite()


def test_the_base_gets_no_gradients() -> None:
    base = tiny_base("llama")
    before = {name: parameter.clone() for name, parameter in base.model.named_parameters()}
    gradients(base, [[0, 1]])
    for name, parameter in base.model.named_parameters():
        assert parameter.grad is None and not parameter.requires_grad
        assert torch.equal(parameter, before[name])


def test_a_base_that_is_not_frozen_is_a_bug() -> None:
    base = tiny_base("llama")
    next(base.model.parameters()).requires_grad_()
    with pytest.raises(AssertionError, match="frozen"):
        MicroBatchRunner(base, recompute=False)


def test_bfloat16_base_learns_in_float32() -> None:
    base = wrap_base(tiny_model("llama").to(torch.bfloat16), name="llama")
    total, found = gradients(base, [[0, 1], [2]])
    assert all(gradient.dtype == torch.float32 for gradient in found)
    exact, expected = gradients(tiny_base("llama"), [[0, 1], [2]])
    assert total == pytest.approx(exact, rel=0.05)
    flat, expected_flat = (torch.cat([g.flatten() for g in grads]) for grads in (found, expected))
    assert torch.nn.functional.cosine_similarity(flat, expected_flat, dim=0) > 0.98


def test_packing_keeps_rows_apart() -> None:
    rows = pack_rows(CORPUS, [3, 0], CPU)
    assert rows.bounds == (0, 3, 12)
    assert rows.positions_T.tolist() == [*range(3), *range(9)]
    assert rows.targets == sum(int(CORPUS.row(row)[1].sum()) for row in (3, 0))
    assert torch.equal(rows.tokens_T[rows.keep_K + 1], rows.labels_K)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "recompute"),
    [
        ("llama", SETTINGS, False),
        ("llama", LoraSettings(r=4, alpha=8, targets=("q_proj", "v_proj", "down_proj")), True),
        ("gpt2", SETTINGS, True),
        ("gemma2", SETTINGS, False),
    ],
    ids=["llama", "some targets", "gpt2", "gemma2"],
)
def test_sites_of_one_input_learn_as_one(family: str, settings: LoraSettings, recompute: bool) -> None:
    """Where a base's weights are stacked for serving, training goes through them too: the same NLL and gradients."""
    packs = [[0, 1, 2], [3]]
    nll, expected = gradients(tiny_base(family), packs, settings=settings, recompute=recompute)
    base = tiny_base(family)
    FusedBase(base, compiled=False)
    calls = count(base)
    got_nll, got = gradients(base, packs, settings=settings, recompute=recompute, lora_backend=SEGMENTED)
    assert got_nll == pytest.approx(nll, rel=1e-5)
    for mine, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    assert all(calls.values()), "every shared input was taken as one"


@pytest.mark.slow
@pytest.mark.parametrize("dropout", sample({"plain": None, "dropout": DropoutSpec(0.4, 7)}, "dropout"))
def test_gradients_are_added_by_the_kernels(dropout: DropoutSpec | None) -> None:
    """At sites that learn alone, too, and down to the lowest layer, below which nothing learns."""
    packs = [[0, 1, 2], [3]]
    nll, expected = gradients(tiny_base("llama"), packs, dropout=dropout)
    got_nll, got = gradients(tiny_base("llama"), packs, dropout=dropout, lora_backend=SEGMENTED)
    assert got_nll == pytest.approx(nll, rel=1e-5)
    for mine, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_adapters_are_prepared_once_a_micro_batch(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers and passes there are."""
    prepared, prepare = list[int](), GroupedBackend.prepare

    def counted(backend: GroupedBackend, segments: Segments, *rest: Any) -> GroupedLora:
        prepared.append(segments.tokens)
        return prepare(backend, segments, *rest)

    monkeypatch.setattr(GroupedBackend, "prepare", counted)
    gradients(tiny_base("llama"), [[0, 1, 2], [3]], recompute=recompute)
    assert len(prepared) == 2


def test_sums_of_gradients_lie_as_kernels_add_to_them() -> None:
    """Whatever the start's strides are."""
    base = tiny_base("llama")
    site = base.spec.sites["model.layers.0.self_attn.q_proj"]
    turned = LoraPair(torch.randn(site.in_features, 4).T, torch.randn(4, site.out_features).T, 1.0)
    start = LoraWeights(SETTINGS, {"model.layers.0.self_attn.q_proj": turned})
    (pair,) = AdapterOptimizer(start, base.spec, TrainingSettings(), base.dtype).weights().sites.values()
    assert pair.main_grads is not None
    for own, matrix in ((pair.main_grads.a_RD, turned.a_RD), (pair.main_grads.b_OR, turned.b_OR)):
        assert own.is_contiguous()
        assert (own.shape, own.dtype) == (matrix.shape, torch.float32)


def count(base: Base) -> dict[int, int]:
    """How often each shared input's product was asked for by training, from now on."""
    calls: dict[int, int] = {}
    for index, shared in enumerate(base.sites.shared()):
        calls[index], learned = 0, shared.learned

        def counted(
            place: int, x: torch.Tensor, lora: PreparedLora, index: int = index, learned=learned
        ) -> torch.Tensor:
            calls[index] += 1
            return learned(place, x, lora)

        shared.learned = counted  # type: ignore[method-assign]
    return calls
