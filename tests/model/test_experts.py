"""Experts with adapters: what is served and trained equals transformers with merged weights, and PEFT's gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy

from coserve.core.errors import InvalidRequest
from coserve.core.link.jobs import JobSucceeded
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterRef, LoraSettings
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.init import new_adapter
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.kernels.lora.segments import Segments
from coserve.lora.files.targets import resolve_targets
from coserve.lora.store.files import load_adapter
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraBatch, LoraWeights
from tests.support.examples import in_turns
from tests.support.families import tiny_family
from tests.support.finetuning import Bench, job_spec, pack_rows, random_corpus
from tests.support.lora_backends import GROUPED
from tests.support.lora_reference import adapted, alone, packed, save_peft, tokens_of

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3", "glm4_moe", "qwen3_5_moe")
ROWS = ((5, 77, 31, 8, 90, 14, 63), (9, 4, 100))


def load(base: Base, folder: Path) -> LoraWeights:
    return load_adapter(folder, base.spec, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_two_adapters_and_none_in_one_batch_equal_merged_weights(family: str, tmp_path: Path) -> None:
    """Each adapter's sequence comes back later in the batch, and one adapter changes experts of down alone."""
    base, kinds = wrap_base(tiny_family(family), name=family), ((3, BOTH, ["q_proj", "o_proj"]), (5, BOTH[1:], []))
    sequences = [tokens_of(length, seed=length) for length in (11, 9, 7, 5)]
    adapters, merged = [], [tiny_family(family)]
    for rank, parameters, modules in kinds:
        folder = tmp_path / str(rank)
        model = save_peft(
            tiny_family(family), folder, seed=rank, r=rank, target_modules=modules, target_parameters=parameters
        )
        adapters.append(load(base, folder))
        merged.append(model.merge_and_unload())
    batch = LoraBatch(Segments((0, 11, 20, 27, 32), (0, -1, 1, 0)), tuple(adapters), GROUPED)
    found = packed(base, sequences, batch)
    for logits, model, tokens in zip(found, (merged[1], merged[0], merged[2], merged[1]), sequences, strict=True):
        torch.testing.assert_close(logits, alone(model, tokens), atol=2e-4, rtol=1e-4)
    apart = (alone(merged[1], sequences[0]) - alone(merged[0], sequences[0])).abs().max()
    assert apart > 0.1, "an adapter that is left out would not be seen"
    plain = packed(base, sequences)
    only = packed(base, sequences, LoraBatch(Segments((0, 32), (-1,)), (), GROUPED))
    assert all(torch.equal(one, other) for one, other in zip(plain, only, strict=True))


@pytest.mark.parametrize(("family", "modules"), [("mixtral", []), ("gpt_oss", ["q_proj"]), ("deepseek_v3", ["o_proj"])])
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_those_of_peft(family: str, modules: list[str], tmp_path: Path) -> None:
    base = wrap_base(tiny_family(family), name=family)
    model = save_peft(tiny_family(family), tmp_path, r=3, target_modules=modules, target_parameters=BOTH)
    optimizer = AdapterOptimizer(load(base, tmp_path), base.spec, TrainingSettings(), base.dtype)
    corpus = Corpus(
        tokens=np.array([*ROWS[0], *ROWS[1]], np.int32),
        target=np.array([int(i > 0) for row in ROWS for i in range(len(row))], np.uint8),
        bounds=np.array([0, len(ROWS[0]), len(ROWS[0]) + len(ROWS[1])]),
    )
    rows = pack_rows(corpus, [0, 1], torch.device("cpu"))
    lora = LoraBatch(Segments((0, rows.tokens), (0,)), (optimizer.weights(),), GROUPED, None)
    step = MicroBatchRunner(base, recompute=True).forward_backward(rows, lora, optimizer.trainable, optimizer.grads)
    loss = run_to_end(step, None)[:, 0].sum().float()
    losses = [
        cross_entropy(model(torch.tensor([row])).logits[0, :-1], torch.tensor(row[1:]), reduction="sum") for row in ROWS
    ]
    expected = torch.stack(losses).sum()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-4, rtol=1e-4)
    expected.backward()
    parameters = {name.replace(".default", ""): own for name, own in model.named_parameters()}
    for site, pair in optimizer.weights().sites.items():
        assert pair.main_grads is not None
        nested = "experts.base_layer" if "gate_up" in site else "experts"
        name = f"base_model.model.{site.rpartition('.')[0].replace('experts', nested) if pair.experts > 1 else site}"
        wanted = [parameters[f"{name}.lora_{kind}.weight"].grad for kind in "AB"]
        a, b = (own for own in wanted if own is not None)
        if pair.experts > 1:
            b = b.view(b.shape[0], pair.rank, pair.experts).permute(2, 0, 1).flatten(0, 1)
        for found, own in ((pair.main_grads.a_RD, a), (pair.main_grads.b_OR, b)):
            torch.testing.assert_close(found, own, atol=1e-4 * max(1.0, float(own.abs().max())), rtol=1e-3, msg=site)


@pytest.mark.parametrize("family", in_turns((*FAMILIES, "deepseek_v2"), ("qwen3_moe",)))
@pytest.mark.filterwarnings("ignore")
def test_what_a_job_trained_is_the_same_in_peft(family: str, tmp_path: Path) -> None:
    bench, rows = Bench(wrap_base(tiny_family(family), name=family), tmp_path), random_corpus(3, (6, 9, 7, 8))
    spec = job_spec(rows, "job", r=2, targets=None, target_parameters=tuple(BOTH), steps=4, learning_rate=0.05)
    messages = bench.train(bench.place(rows, spec))
    assert isinstance(messages[-1], JobSucceeded)
    folder, tokens = bench.folder.adapter(AdapterRef("learned", 1)), tokens_of(11)
    peft = PeftModel.from_pretrained(tiny_family(family), str(folder)).eval()
    found, plain = adapted(bench.base, load(bench.base, folder), tokens), alone(tiny_family(family), tokens)
    torch.testing.assert_close(found, alone(peft, tokens), atol=1e-4, rtol=1e-4)
    assert (found - plain).abs().max() > 0.1


def test_a_new_adapter_has_a_pair_of_its_own_for_each_expert() -> None:
    base = wrap_base(tiny_family("mixtral"), name="mixtral").spec
    settings = LoraSettings(r=2, target_parameters=("down_proj",))
    found = new_adapter(settings, base, seed=1, dtype=torch.float32, device="cpu")
    assert [*found.sites] == ["model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.down_proj"]
    pair = found.sites["model.layers.0.mlp.experts.down_proj"]
    assert pair.a_RD.shape == (4 * 2, 48) and pair.b_OR.shape == (4 * 32, 2) and pair.rank == 2
    assert len({float(own.sum()) for own in pair.a_RD.chunk(4)}) == 4
    mixed = LoraSettings(targets=("q_proj",), target_parameters=("mlp.experts.gate_up_proj",))
    assert len(resolve_targets(mixed, base)) == 4


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (LoraSettings(target_parameters=("gate.weight",)), "target_parameters"),
        (LoraSettings(target_parameters=("experts.down_proj",), dropout=0.1), "dropout"),
        (LoraSettings(target_parameters=("experts.down_proj",), use_dora=True), "use_dora"),
        (LoraSettings(target_parameters=("experts.down_proj",), bd_blocks=2), "bd_blocks"),
        (LoraSettings(targets=("experts.down_proj",)), "targets"),
    ],
)
def test_settings_that_experts_cannot_have_are_refused(settings: LoraSettings, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve_targets(settings, wrap_base(tiny_family("mixtral"), name="mixtral").spec)
    assert refused.value.field == field
