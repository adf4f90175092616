"""Adapters of experts' parameters in each form of file: read into the same matrices, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from coserve.core.errors import AdapterError, CorruptAdapter, ShapeMismatch, UnsupportedAdapter
from coserve.lora.files.peft import inspect_adapter
from coserve.lora.store.files import load_adapter, save_adapter
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraWeights
from tests.support.families import tiny_family
from tests.support.lora_reference import adapted, alone, save_peft, tokens_of
from tests.support.sized_adapters import same_adapter

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
RANK, ALPHA = 3, 12


@cache
def base_of(family: str) -> Base:
    return wrap_base(tiny_family(family), name=family)


def load(folder: Path, family: str) -> LoraWeights:
    return load_adapter(folder, base_of(family).spec, dtype=torch.float32)


def write(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({f"base_model.model.{name}": own.contiguous() for name, own in tensors.items()}, folder / WEIGHTS)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": None}
    (folder / CONFIG).write_text(json.dumps(settings | config))
    return folder


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")
def test_what_peft_wrote_is_written_again_and_peft_loads_it(family: str, tmp_path: Path) -> None:
    """Mixed with attention, and a rank of its own at one parameter of one layer."""
    own = {"model.layers.1.mlp.experts.down_proj": 5}
    peft = save_peft(
        tiny_family(family),
        tmp_path / "theirs",
        r=RANK,
        target_modules=["q_proj"],
        target_parameters=BOTH,
        rank_pattern=own,
    )
    ours = tmp_path / "ours"
    ours.mkdir()
    weights = load(tmp_path / "theirs", family)
    assert weights.sites["model.layers.1.mlp.experts.down_proj"].rank == 5
    assert weights.sites["model.layers.0.mlp.experts.down_proj"].experts == 4
    save_adapter(ours, weights, base_of(family).spec)
    again = load(ours, family)
    assert again.settings == weights.settings and same_adapter(again, weights)
    reloaded = PeftModel.from_pretrained(tiny_family(family), str(ours)).eval()
    torch.testing.assert_close(alone(reloaded, tokens_of(11)), alone(peft, tokens_of(11)), atol=1e-4, rtol=1e-4)
    info = inspect_adapter(ours, base_of(family).spec)
    assert {*info.targets} == {"q_proj", *BOTH} and info.rank == 5


@pytest.mark.filterwarnings("ignore")
def test_sides_that_peft_swapped_before_0_19_are_told_by_their_shapes(tmp_path: Path) -> None:
    save_peft(tiny_family("mixtral"), tmp_path / "new", r=RANK, target_modules=[], target_parameters=BOTH)
    weights, tensors = load(tmp_path / "new", "mixtral"), load_file(tmp_path / "new" / WEIGHTS)
    for name in [name for name in tensors if "lora_A" in name]:
        a_ERD = tensors[name].view(4, RANK, -1)
        other = name.replace("lora_A", "lora_B")
        b_ORE = tensors[other].view(-1, RANK, 4)
        tensors[name] = b_ORE.permute(2, 1, 0).flatten(0, 1).contiguous()
        tensors[other] = a_ERD.permute(2, 1, 0).flatten(1).contiguous()
    save_file(tensors, tmp_path / "new" / WEIGHTS)
    assert same_adapter(load(tmp_path / "new", "mixtral"), weights)
    one = next(name for name in tensors if "base_layer.lora_A" in name)
    swapped = {name: own.flip(0) if name == one else own for name, own in tensors.items()}
    swapped[one] = torch.zeros(4 * RANK, 7)
    save_file(swapped, tmp_path / "new" / WEIGHTS)
    with pytest.raises(ShapeMismatch, match="expected sides"):
        load(tmp_path / "new", "mixtral")


@pytest.mark.filterwarnings("ignore")
def test_a_square_parameter_needs_the_version_of_its_writer(tmp_path: Path) -> None:
    save_peft(tiny_family("qwen3_moe"), tmp_path, r=RANK, target_modules=[], target_parameters=BOTH[:1])
    config = json.loads((tmp_path / CONFIG).read_text())
    straight = load(tmp_path, "qwen3_moe")
    (tmp_path / CONFIG).write_text(json.dumps(config | {"peft_version": "0.18.1"}))
    assert not same_adapter(load(tmp_path, "qwen3_moe"), straight)
    for unknown in (None, "0.18.2.dev0@a1b2c3"):  # of the development version, some were before the change
        (tmp_path / CONFIG).write_text(json.dumps(config | {"peft_version": unknown}))
        with pytest.raises(UnsupportedAdapter, match="peft_version") as refused:
            load(tmp_path, "qwen3_moe")
        assert refused.value.field == "peft_version"


def single(family: str, path: str, names: tuple[str, str, str]) -> dict[str, Tensor]:
    """Matrices of every expert of layer 1, of gate, up and down."""
    torch.manual_seed(3)
    found = {}
    for part, spec in zip(names, ("gate_up_proj", "gate_up_proj", "down_proj"), strict=True):
        site = base_of(family).spec.experts[f"model.layers.1.mlp.experts.{spec}"]
        outputs = site.out_features // (2 if spec == "gate_up_proj" else 1)
        for expert in range(site.experts):
            found[f"{path}.{expert}.{part}.lora_A.weight"] = torch.randn(RANK, site.in_features)
            found[f"{path}.{expert}.{part}.lora_B.weight"] = torch.randn(outputs, RANK)
    return found


def check_merged(weights: LoraWeights, family: str, delta: Callable[[int, str], Tensor]) -> None:
    """Compare what each expert of layer 1 adds to its gate, up and down with `delta(expert, part)`."""
    for site, pair in weights.sites.items():
        spec = base_of(family).spec.experts[site]
        for expert, (a, b) in enumerate(zip(pair.a_RD.chunk(4), pair.b_OR.chunk(4), strict=True)):
            found = pair.scaling * b @ a
            parts = {"down": found}
            if spec.halves:
                gate, up = (found[0::2], found[1::2]) if spec.halves == "interleaved" else found.chunk(2)
                parts = {"gate": gate, "up": up}
            for part, own in parts.items():
                torch.testing.assert_close(own, delta(expert, part), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "path", "names"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts", ("w1", "w3", "w2")),
        ("qwen3_moe", "model.layers.1.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("gpt_oss", "model.layers.1.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_single_experts(family: str, path: str, names: tuple[str, str, str], tmp_path: Path) -> None:
    """As their definition says, and as PEFT reads those that it knows."""
    tensors = single(family, path, names)
    named = dict(zip(("gate", "up", "down"), names, strict=True))

    def delta(expert: int, part: str) -> Tensor:
        a, b = (tensors[f"{path}.{expert}.{named[part]}.lora_{kind}.weight"] for kind in "AB")
        return ALPHA / RANK * b @ a

    weights = load(write(tmp_path / "whole", tensors, target_modules=list(names)), family)
    assert [pair.rank for pair in weights.sites.values()] == [2 * RANK, RANK]
    check_merged(weights, family, delta)
    if family != "gpt_oss":
        peft = PeftModel.from_pretrained(tiny_family(family), str(tmp_path / "whole")).eval()
        found = adapted(base_of(family), weights, tokens_of(11))
        torch.testing.assert_close(found, alone(peft, tokens_of(11)), atol=1e-4, rtol=1e-4)
        assert (found - alone(tiny_family(family), tokens_of(11))).abs().max() > 0.1
    assert weights.settings.targets is None and weights.settings.target_parameters is not None
    for left_out in [name for name in tensors if f".2.{names[0]}." in name]:  # an expert that is not adapted adds zeros
        tensors[left_out].zero_()
    some = {name: own for name, own in tensors.items() if f".2.{names[0]}." not in name}
    check_merged(load(write(tmp_path / "some", some, target_modules=list(names)), family), family, delta)


def test_outer_matrices_that_all_experts_share(tmp_path: Path) -> None:
    path = "model.layers.1.mlp.experts"
    torch.manual_seed(4)
    shapes = {"w1": (1, 4, 32, 48), "w3": (1, 4, 32, 48), "w2": (4, 1, 48, 32)}
    tensors = {}
    for part, (in_a, in_b, inputs, outputs) in shapes.items():
        tensors[f"{path}.{part}.lora_A.weight"] = torch.randn(in_a, RANK, inputs)
        tensors[f"{path}.{part}.lora_B.weight"] = torch.randn(in_b, outputs, RANK)
    named = {"gate": "w1", "up": "w3", "down": "w2"}

    def delta(expert: int, part: str) -> Tensor:
        a, b = (tensors[f"{path}.{named[part]}.lora_{kind}.weight"].expand(4, -1, -1)[expert] for kind in "AB")
        return ALPHA / RANK * b @ a

    check_merged(load(write(tmp_path, tensors), "mixtral"), "mixtral", delta)


def _without(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name: own for name, own in tensors.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "config", "error", "reason"),
    [
        (lambda t: _without(t, "0.w1.lora_B"), {}, CorruptAdapter, "only one of them"),
        (
            lambda t: t | {"model.layers.1.mlp.experts.9.w1.lora_A.weight": torch.zeros(3, 32)},
            {},
            CorruptAdapter,
            "only",
        ),
        (lambda t: {k: v[:2] if "1.w2.lora_A" in k else v for k, v in t.items()}, {}, ShapeMismatch, r"w2: expected"),
        (lambda t: t, {"target_modules": ["w1", "w3"]}, CorruptAdapter, "does not target"),
        (lambda t: t, {"alpha_pattern": {"w1": 7}}, UnsupportedAdapter, "one scaling"),
        (lambda t: t, {"r": 5}, ShapeMismatch, "rank 5"),
        (lambda t: t, {"use_dora": True}, UnsupportedAdapter, "experts"),
    ],
)
def test_what_would_be_wrong_is_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    config: dict[str, object],
    error: type[AdapterError],
    reason: str,
    tmp_path: Path,
) -> None:
    tensors = change(single("mixtral", "model.layers.1.mlp.experts", ("w1", "w3", "w2")))
    with pytest.raises(error, match=reason):
        load(write(tmp_path, tensors, **config), "mixtral")


def test_a_base_without_experts_says_so(tmp_path: Path) -> None:
    tensors = single("mixtral", "model.layers.1.mlp.experts", ("w1", "w3", "w2"))
    with pytest.raises(UnsupportedAdapter, match="need a base with fused experts' parameters, llama has none"):
        load(write(tmp_path, tensors), "llama")
