"""Bases whose layers are quantised at load serve and train as plain models with the dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from coserve.core.errors import UnsupportedBase
from coserve.core.names import ADAPTER_WEIGHTS
from coserve.core.types import AdapterRef
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.generate.generator import Generator
from coserve.kernels.lora.segments import Segments
from coserve.lora.files.peft import QUANTIZATION, inspect_adapter
from coserve.lora.store.files import load_adapter
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.formats.sizes import read_sizes
from coserve.model.fused import FusedBase
from coserve.model.layers import LayerCut
from coserve.model.load import load_base
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.quantized.modules import QuantizedLinear
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.executors import graphs
from tests.support.families import tiny_family
from tests.support.finetuning import CPU, Bench, gradient_sums, job_spec, metrics_of, pack_rows, random_corpus, started
from tests.support.generation import collect, prompt, request
from tests.support.interpreted import interpreted
from tests.support.lora_backends import GROUPED, SEGMENTED
from tests.support.lora_reference import alone, packed, save_peft, tokens_of
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def save_base(folder: Path, family: str = "llama", **overrides: object) -> Path:
    tiny_family(family, **SIZES, **overrides).save_pretrained(folder)
    return folder


def load(folder: Path, quantization: str = "none", *, device: str = "cpu") -> Base:
    return load_base(str(folder), device=device, dtype="auto", quantization=quantization)


def dequantized(folder: Path, base: Base) -> PreTrainedModel:
    """The model of the files, plain, with a quantised base's weights."""
    plain = tiny_family(base.spec.family, **SIZES)
    plain.load_state_dict(load(folder).model.state_dict())
    with torch.no_grad():
        for name, module in base.model.named_modules():
            if isinstance(module, QuantizedLinear):
                plain.get_submodule(name).weight.copy_(module.weight)
    return plain


KINDS = ("fp8", "nf4")
CORPUS = random_corpus()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module", params=KINDS)
def base(request: pytest.FixtureRequest, folder: Path) -> Base:
    return load(folder, request.param)


def test_the_layers_alone_are_quantised(base: Base, folder: Path) -> None:
    plain, kind = load(folder), base.spec.quantization
    assert base.spec.fingerprint == plain.spec.fingerprint and plain.spec.quantization == "none"
    assert kind.upper() in base.note and "linear modules" in base.note
    for name, module in plain.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert isinstance(base.model.get_submodule(name), QuantizedLinear) == (name != "lm_head")
    most = {"fp8": 0.04, "nf4": 0.11}[kind]
    for name in base.spec.sites:
        dense = plain.model.get_submodule(name).weight
        assert (base.model.get_submodule(name).weight - dense).norm() < most * dense.norm()
    sizes = read_sizes(str(folder), base.spec.dtype, quantization=kind)
    held = (*base.model.parameters(), *base.model.buffers())
    assert sizes.weights == sum(one.nbytes for one in held) and sizes.expanded


def test_greedy_tokens_are_those_of_the_dequantised_model(base: Base, folder: Path) -> None:
    plain, prompts = dequantized(folder, base), [prompt(length) for length in (3, 17, 9)]
    kv = KvCache.for_base(base, 512, 16)
    executor = graphs(FusedBase(base, compiled=False), kv, max_running=4, step_tokens=48)
    gen = Generator(base, Shelf().store(), kv, executor, max_running=4, step_tokens=48)
    found = collect(gen, [request(str(i), tokens) for i, tokens in enumerate(prompts)])
    for i, tokens in enumerate(prompts):
        expected = plain.generate(torch.tensor([tokens]), max_new_tokens=10, do_sample=False, pad_token_id=0)
        assert found[str(i)][0] == expected[0, len(tokens) :].tolist()


def plain_gradients(base: Base, folder: Path, weights: LoraWeights, rows: list[int]) -> dict[str, Tensor]:
    """Of the sum of the rows' losses, by autograd through the plain model with `W + scaling B A`."""
    plain, found, merged = dequantized(folder, base), {}, {}
    for name, pair in weights.sites.items():
        a, b = (one.detach().clone().requires_grad_() for one in (pair.a_RD, pair.b_OR))
        found |= {f"{name}.a": a, f"{name}.b": b}
        merged[f"{name}.weight"] = plain.get_submodule(name).weight.detach() + pair.scaling * b @ a
    for row in rows:
        start, end = int(CORPUS.bounds[row]), int(CORPUS.bounds[row + 1])
        tokens = torch.from_numpy(CORPUS.tokens[start:end]).long()
        learned = torch.from_numpy(CORPUS.target[start:end][1:]).bool()
        logits = torch.func.functional_call(plain, merged, (tokens[None],)).logits[0, :-1]
        cross_entropy(logits[learned], tokens[1:][learned], reduction="sum").backward(retain_graph=True)
    return {name: one.grad for name, one in found.items() if one.grad is not None}


@pytest.mark.parametrize("way", ["grouped", "segmented", "compiled"])
@pytest.mark.slow
def test_gradients_are_those_of_the_dequantised_model(base: Base, folder: Path, way: str) -> None:
    """In layer 0, too, which a product without a backward would cut off."""
    optimizer, rows = started(base), [1, 4]
    compiled = CompiledLayers(base, LayerCut(base), interpreted) if way == "compiled" else None
    if compiled is not None:
        compiled.compile()
    packed_rows = pack_rows(CORPUS, rows, CPU)
    backend = GROUPED if way == "grouped" else SEGMENTED
    lora = LoraBatch(Segments((0, packed_rows.tokens), (0,)), (optimizer.weights(),), backend)
    run_to_end(
        MicroBatchRunner(base, recompute=False, compiled=compiled).forward_backward(
            packed_rows, lora, optimizer.trainable, optimizer.grads
        )
    )
    expected = plain_gradients(base, folder, optimizer.weights(), rows)
    found = gradient_sums(optimizer)
    assert found.keys() == expected.keys() and any(".layers.0." in name for name in found)
    for name, own in found.items():
        torch.testing.assert_close(own, expected[name], rtol=2e-3, atol=2e-4)


def test_a_job_learns_and_its_adapter_names_the_quantisation(
    base: Base, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(base, tmp_path)
    messages = bench.train(bench.place(CORPUS, job_spec(CORPUS, steps=12, use_dora=base.spec.quantization == "nf4")))
    losses = [one.loss for one in metrics_of(messages)]
    assert losses[-1] < losses[0] - 0.3
    ref = AdapterRef("learned", 1)
    with safe_open(bench.folder.adapter(ref) / ADAPTER_WEIGHTS, "pt") as file:
        assert file.metadata()[QUANTIZATION] == base.spec.quantization
    plain = load(folder).spec
    with caplog.at_level("INFO"):
        inspect_adapter(bench.folder.adapter(ref), plain)
    assert f"quantised as {base.spec.quantization} is to be served on it as none" in caplog.text
    other = load_adapter(bench.folder.adapter(ref), plain, dtype=torch.float32)
    assert other.sites.keys() == base.spec.sites.keys(), "expected the unquantised base to take it"


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_is_served_as_by_qlora(folder: Path, tmp_path: Path, dora: bool) -> None:
    """A file of transformers, bitsandbytes and PEFT, over the same bytes of the base: exactly as PEFT runs it over the
    dequantised weights, and about as with bitsandbytes, which on a CPU multiplies in bfloat16."""
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, device_map="cpu")
    own = load(folder, "nf4")
    names = list(own.spec.default_targets)
    peft = save_peft(model, tmp_path, r=5, lora_alpha=7, target_modules=names, use_dora=dora)
    adapter = own.served(load_adapter(tmp_path, own.spec, dtype=torch.float32))
    for name in own.spec.sites:
        codes = peft.base_model.model.get_submodule(name).base_layer.weight.data
        assert torch.equal(codes.view(-1), own.model.get_submodule(name).codes.view(-1))
    tokens_T = tokens_of(9)
    (found_TV,) = packed(own, [tokens_T], LoraBatch(Segments((0, 9), (0,)), (adapter,), GROUPED))
    exact = PeftModel.from_pretrained(dequantized(folder, own), str(tmp_path)).eval()
    torch.testing.assert_close(found_TV, alone(exact, tokens_T), rtol=2e-3, atol=2e-3)
    assert (found_TV - (theirs_TV := alone(peft, tokens_T))).norm() < 0.1 * theirs_TV.norm()


def test_routers_and_odd_sizes_stay_dense(tmp_path: Path) -> None:
    """Of a mixture of experts, and of modules whose sizes the formats do not divide."""
    base = load(save_base(tmp_path, "qwen2_moe"), "fp8")
    dense = {name.rsplit(".", 1)[-1] for name, module in base.model.named_modules() if type(module) is torch.nn.Linear}
    assert dense >= {"lm_head", "shared_expert_gate"}
    assert any(isinstance(module, QuantizedLinear) for module in base.model.modules())


def test_a_base_that_was_made_for_images_is_quantised(tmp_path: Path) -> None:
    """The config of its text does not say whether the embeddings are tied."""
    tiny_family("qwen2_vl").save_pretrained(tmp_path)
    base = load(tmp_path, "fp8")
    assert base.spec.quantization == "fp8" and base.spec.fingerprint == load(tmp_path).spec.fingerprint


def test_what_cannot_be_quantised_is_refused_by_name(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedBase, match="gpt2: no linear module of its layers can be quantised to fp8"):
        load(tmp_path, "fp8")


def test_random_weights_are_quantised_as_they_are_drawn(folder: Path) -> None:
    found = [
        load_base(str(folder), device="cpu", dtype="auto", load_format="dummy", quantization=kind) for kind in KINDS
    ]
    first, second = (one.spec for one in found)
    assert first.fingerprint == second.fingerprint and (first.quantization, second.quantization) == KINDS
