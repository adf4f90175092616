"""BD-LoRA's structure: which matrices are block-diagonal, what is refused, and PEFT's `use_bdlora`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import torch
from peft import BdLoraConfig, get_peft_model
from peft import LoraConfig as PeftLora

from coserve.core.errors import CorruptAdapter, InvalidRequest, ShapeMismatch, UnsupportedAdapter
from coserve.core.types import BaseSpec, LoraSettings, SiteSpec
from coserve.finetune.init import new_adapter
from coserve.finetune.lora_tensors import cast
from coserve.lora.files.bdlora import ParallelStyle, blocks_at, parallel_style, peft_blocks
from coserve.lora.files.peft import inspect_adapter
from coserve.lora.files.targets import resolve_targets
from coserve.lora.store.files import load_adapter, save_adapter
from coserve.model.base import wrap_base
from coserve.model.parallel.families.plans import PLANS, Width, joined
from tests.support.examples import sample
from tests.support.families import SERVED, tiny_family
from tests.support.lora_reference import save_peft
from tests.support.records import make_base_spec
from tests.support.tiny_models import tiny_model

LLAMA = {
    "self_attn.q_proj": SiteSpec(8, 8, 0),
    "self_attn.k_proj": SiteSpec(8, 4, 0),
    "self_attn.o_proj": SiteSpec(8, 8, 0),
    "mlp.up_proj": SiteSpec(8, 12, 0),
    "mlp.down_proj": SiteSpec(12, 8, 0),
}


def base_of(sites: dict[str, SiteSpec], family: str = "llama") -> BaseSpec:
    names = {f"model.layers.0.{name}": site for name, site in sites.items()}
    return make_base_spec(names, family=family)


BASE = base_of(LLAMA)


USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("family", sample(SERVED, "llama", "gpt2", "phi", "qwen3"))
def test_the_table_agrees_with_transformers_plans(family: str) -> None:
    model = tiny_family(family)
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    for name, _ in model.named_modules():
        path = re.sub(r"\.\d+\.", ".*.", name)
        style = next((own for key, own in plan.items() if path.endswith(key)), None)
        kind = parallel_style(name)
        if style is not None and kind is not None:
            assert style.startswith("colwise" if kind is ParallelStyle.COLUMN else "rowwise"), name


def test_the_table_agrees_with_our_own_plans() -> None:
    """Where it has a module at all: it has none whose parts on a rank are no contiguous piece."""
    whole = {Width.EVEN, Width.KEY_VALUE}
    for family, plan in PLANS.items():
        for block in plan:
            for kind, widths in ((ParallelStyle.COLUMN, block.column), (ParallelStyle.ROW, block.row)):
                for path, width in widths.items():
                    style = parallel_style(joined(block.path, path))
                    assert style is kind if path in USUAL and width in whole else style in (None, kind), (family, path)


def test_b_is_cut_at_column_parallel_sites_and_a_at_row_parallel_ones() -> None:
    settings = LoraSettings(r=4, bd_blocks=2)
    found = {site.rsplit(".", 1)[-1]: blocks_at(settings, site) for site in resolve_targets(settings, BASE)}
    assert found == {"q_proj": (1, 2), "k_proj": (1, 2), "o_proj": (2, 1), "up_proj": (1, 2), "down_proj": (2, 1)}


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        (LoraSettings(bd_blocks=0), "bd_blocks", "expected 1 to 64 blocks, got 0"),
        (LoraSettings(bd_blocks=65), "bd_blocks", "expected 1 to 64 blocks"),
        (LoraSettings(r=6, bd_blocks=4), "bd_blocks", "rank 6 does not divide into 4 blocks"),
        (LoraSettings(r=4, rank_pattern={"k_proj": 3}, bd_blocks=2), "bd_blocks", "k_proj: rank 3 does not divide"),
        (LoraSettings(r=8, bd_blocks=8), "bd_blocks", "k_proj: out_features 4 does not divide into 8 blocks"),
        (LoraSettings(r=8, targets=("down_proj",), bd_blocks=8), "bd_blocks", "in_features 12 does not divide"),
        (LoraSettings(r=6, bd_blocks=2, init="orthogonal"), "init", "a multiple of 4, got 6"),
        (LoraSettings(targets_bd_a=("o_proj",)), "targets_bd_a", "needs bd_blocks"),
        (LoraSettings(bd_blocks=2, targets_bd_b=("v_proj",)), "targets_bd_b", "none of the targeted sites"),
        (LoraSettings(bd_blocks=2, targets_bd_b=("",)), "targets_bd_b", "none of the targeted sites"),
        (LoraSettings(bd_blocks=2, targets_bd_a=("o_proj",), targets_bd_b=("attn",)), "targets_bd_a", "one of"),
    ],
)
def test_wrong_settings_are_refused_with_their_field(settings: LoraSettings, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refused:
        resolve_targets(settings, BASE)
    assert refused.value.field == field


def test_fused_and_transposed_modules_are_refused() -> None:
    fused = base_of({"self_attn.qkv_proj": SiteSpec(8, 16, 0), "self_attn.o_proj": SiteSpec(8, 8, 0)})
    with pytest.raises(InvalidRequest, match=r"qkv_proj is neither column- nor row-parallel.* among o_proj") as refused:
        resolve_targets(LoraSettings(r=4, bd_blocks=2), fused)
    assert refused.value.field == "targets"
    conv = base_of({"attn.c_proj": SiteSpec(8, 8, 0)}, family="gpt2")
    with pytest.raises(InvalidRequest, match="Conv1D"):
        resolve_targets(LoraSettings(r=4, bd_blocks=2), conv)


def test_patterns_are_as_long_as_they_must_be() -> None:
    neox = base_of({"attention.dense": SiteSpec(8, 8, 0), "mlp.dense_h_to_4h": SiteSpec(8, 16, 0)}, "gpt_neox")
    settings = LoraSettings(r=4, bd_blocks=2)
    found = peft_blocks(settings, resolve_targets(settings, neox))
    assert found is not None
    assert found["target_modules_bd_a"] == ["attention.dense"]  # `dense` alone is part of dense_h_to_4h too
    assert found["target_modules_bd_b"] == ["dense_h_to_4h"]
    assert peft_blocks(LoraSettings(), list(neox.sites)) is None


def test_each_block_starts_as_a_lora_of_its_shard() -> None:
    settings = LoraSettings(r=32, bd_blocks=4)
    base = base_of({"mlp.up_proj": SiteSpec(64, 48, 0), "mlp.down_proj": SiteSpec(256, 64, 0)})
    up, down = new_adapter(settings, base, seed=0, dtype=torch.float32, device="cpu").sites.values()
    assert (up.a_RD.shape, up.b_OR.shape, up.a_blocks, up.b_blocks) == ((32, 64), (48, 8), 1, 4)
    assert (down.a_RD.shape, down.b_OR.shape, down.a_blocks, down.b_blocks) == ((32, 64), (64, 32), 4, 1)
    for pair in (up, down):
        assert torch.count_nonzero(pair.b_OR) == 0
        assert float(pair.a_RD.abs().max()) <= 64**-0.5  # Kaiming, a fan-in of 64 in both
        assert float(pair.a_RD.std()) == pytest.approx(64**-0.5 / 3**0.5, rel=0.05)
        assert pair.scaling == 2.0  # by the rank of all blocks, as in PEFT
    rslora = msgspec.structs.replace(settings, rslora=True, alpha=16.0)
    assert (
        new_adapter(rslora, base, seed=0, dtype=torch.float32, device="cpu").sites.popitem()[1].scaling == 16 / 32**0.5
    )


def test_orthogonal_blocks_have_a_zero_product() -> None:
    settings = LoraSettings(r=8, bd_blocks=2, init="orthogonal")
    base = base_of({"mlp.up_proj": SiteSpec(64, 48, 0), "mlp.down_proj": SiteSpec(64, 64, 0)})
    for pair in new_adapter(settings, base, seed=0, dtype=torch.float32, device="cpu").sites.values():
        dense = pair.dense()
        assert float((dense.b_OR @ dense.a_RD).abs().max()) < 1e-5
        assert float(dense.b_OR.std()) > 0.01


def test_our_config_is_the_one_that_peft_writes(tmp_path: Path) -> None:
    base = wrap_base(tiny_model("llama"), name="tiny")
    settings = LoraSettings(r=4, bd_blocks=2)
    save_adapter(tmp_path, new_adapter(settings, base.spec, seed=0, dtype=torch.float32, device="cpu"), base.spec)
    ours = json.loads((tmp_path / "adapter_config.json").read_text())["use_bdlora"]
    bd = BdLoraConfig(
        nblocks=2, target_modules_bd_a=ours["target_modules_bd_a"], target_modules_bd_b=ours["target_modules_bd_b"]
    )
    assert get_peft_model(tiny_model("llama"), PeftLora(r=4, target_modules="all-linear", use_bdlora=bd)) is not None
    assert set(ours["target_modules_bd_a"]) == {"o_proj", "down_proj"}
    assert set(ours["target_modules_bd_b"]) == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert (ours["nblocks"], ours["match_strict"]) == (2, True)
    again = inspect_adapter(tmp_path, base.spec).settings
    assert (again.bd_blocks, set(again.targets_bd_a or ())) == (2, {"o_proj", "down_proj"})


def test_only_the_blocks_are_kept(tmp_path: Path) -> None:
    bd = BdLoraConfig(nblocks=2, target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"])
    save_peft(tiny_model("llama"), tmp_path, r=8, target_modules=["q_proj", "o_proj"], use_bdlora=bd)
    base = wrap_base(tiny_model("llama"), name="tiny")
    weights = cast(load_adapter(tmp_path, base.spec, dtype=torch.float32), torch.bfloat16)
    shapes = {site.rsplit(".", 1)[-1]: (pair.a_RD.shape, pair.b_OR.shape) for site, pair in weights.sites.items()}
    assert shapes == {"q_proj": ((8, 32), (32, 4)), "o_proj": ((8, 16), (32, 8))}
    assert all(max(pair.a_blocks, pair.b_blocks) == 2 for pair in weights.sites.values())


def test_one_block_is_a_plain_adapter(tmp_path: Path) -> None:
    bd = BdLoraConfig(target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"])
    save_peft(tiny_model("llama"), tmp_path, r=4, target_modules=["q_proj", "o_proj"], use_bdlora=bd)
    base = wrap_base(tiny_model("llama"), name="tiny")
    settings = load_adapter(tmp_path, base.spec, dtype=torch.float32).settings
    assert (settings.bd_blocks, settings.targets_bd_a, settings.targets_bd_b) == (1, None, None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"nblocks": 1}, ShapeMismatch, "lora_B: expected shape"),
        ({"nblocks": 3}, ShapeMismatch, "divide"),
        ({"nblocks": 4}, ShapeMismatch, "expected shape"),
        ({"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["o_proj"]}, ShapeMismatch, "expected shape"),
        ({"target_modules_bd_a": ["o_proj", "q_proj"]}, CorruptAdapter, "overlap"),
        ({"target_modules_bd_a": ["self_attn"]}, CorruptAdapter, "both"),
        ({"target_modules_bd_a": None}, CorruptAdapter, "for neither A nor B"),
        ({"nblocks": "2"}, UnsupportedAdapter, "expected nblocks of 1 to 128"),
        ({"target_modules_bd_a": "o_proj"}, UnsupportedAdapter, "as lists of at most 1024 names"),
        ({"target_modules_bd_a": ["o_proj"] * 1025}, UnsupportedAdapter, "as lists of at most 1024 names"),
    ],
)
def test_damaged_blocks_are_refused(
    changes: dict[str, object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    bd = BdLoraConfig(nblocks=2, target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"])
    save_peft(tiny_model("llama"), tmp_path, r=8, target_modules=["q_proj", "o_proj"], use_bdlora=bd)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    config["use_bdlora"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        load_adapter(tmp_path, wrap_base(tiny_model("llama"), name="tiny").spec, dtype=torch.float32)


def test_blocks_of_transposed_modules_are_refused(tmp_path: Path) -> None:
    save_peft(tiny_model("gpt2"), tmp_path, r=4, target_modules=["c_fc"], fan_in_fan_out=True)
    path = tmp_path / "adapter_config.json"
    blocks = {"nblocks": 2, "target_modules_bd_a": [], "target_modules_bd_b": ["c_fc"], "match_strict": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_bdlora": blocks}))
    with pytest.raises(UnsupportedAdapter, match="Conv1D modules of gpt2"):
        inspect_adapter(tmp_path, wrap_base(tiny_model("gpt2"), name="tiny").spec)
