"""Matching of targets and patterns: PEFT's own rules, without running its regular expressions."""

from __future__ import annotations

import re

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from peft.utils.other import get_pattern_key

from coserve.core.errors import InvalidRequest
from coserve.core.types import LoraRequest, LoraSettings, SiteSpec
from coserve.lora.files.matching import matching_targets
from coserve.lora.files.targets import (
    UnsafePattern,
    lookup,
    pattern_matches,
    rank_and_scaling,
    resolve_targets,
    targets_match,
)
from tests.support.records import make_base_spec
from tests.support.tiny_models import tiny_model

SITES = {
    f"model.layers.{i}.{name}": SiteSpec(8, 8, i)
    for i in range(2)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
}
BASE = make_base_spec(SITES)

names = st.lists(st.sampled_from(["a", "b", "0", "_", "-", ".", "ab"]), max_size=6).map("".join)
patterns = st.tuples(
    st.sampled_from(["", "^"]),
    st.lists(st.sampled_from(["a", "b", "0", "_", "-", ".", r"\."]), min_size=1, max_size=5).map("".join),
    st.sampled_from(["", "$"]),
).map("".join)


@given(patterns, names)
def test_a_pattern_matches_as_pefts_regular_expression(pattern: str, site: str) -> None:
    assert pattern_matches(pattern, site) == (re.match(rf"(.*\.)?({pattern})$", site) is not None)


@given(st.lists(patterns, max_size=4, unique=True), names)
def test_the_first_pattern_wins_as_in_peft(keys: list[str], site: str) -> None:
    table = {key: index for index, key in enumerate(keys)}
    assert lookup(table, site, -1) == table.get(get_pattern_key(keys, site), -1)


@pytest.mark.parametrize(
    "pattern", ["", "a*", "(a)", "a|b", "[ab]", "a+", "a?", "a{2}", r"\d", "a b", "é", "a\n", "$a", "^"]
)
def test_anything_more_than_a_name_is_refused(pattern: str) -> None:
    with pytest.raises(UnsafePattern):
        pattern_matches(pattern, "a")


def test_targets_match_whole_parts_from_the_end() -> None:
    site = "model.layers.1.mlp.up_proj"
    assert all(targets_match(frozenset({target}), site) for target in ("up_proj", "mlp.up_proj", "1.mlp.up_proj", site))
    assert not any(targets_match(frozenset({target}), site) for target in ("proj", "p.up_proj", "mlp", "model", ""))


def test_settings_resolve_to_sites_in_order() -> None:
    assert resolve_targets(LoraSettings(), BASE) == list(SITES)
    for body in (b'{"targets": "all-linear"}', b'{"targets": ["all-linear"]}'):
        assert msgspec.json.decode(body, type=LoraRequest).targets is None, "PEFT's name of the default"
    some = LoraSettings(targets=("up_proj", "model.layers.0.self_attn.q_proj"))
    assert resolve_targets(some, BASE) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|v)_proj",
        r"model\.layers\.[02]\.(?:mlp|self_attn)\..*_proj",
        r".*self_attn\.q_proj|.*1\.mlp\.(up|down)_proj",
        r"model\.layers\.\d+\.self_attn\.q_proj|lm_head",
    ],
)
def test_a_text_is_a_regular_expression_of_whole_names_as_in_peft(pattern: str) -> None:
    model = tiny_model("llama")
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    base = make_base_spec({name: SiteSpec(8, 8, 0) for name in linear})
    settings = LoraSettings(targets=matching_targets(pattern, base, field="targets"))
    assert (
        resolve_targets(settings, base)
        == get_peft_model(model, LoraConfig(target_modules=pattern)).targeted_module_names
    )
    assert msgspec.json.decode(msgspec.json.encode({"targets": pattern}), type=LoraRequest).targets == pattern


def test_rank_and_scaling_follow_pefts_formulas() -> None:
    settings = LoraSettings(r=4, rank_pattern={"q_proj": 9}, alpha_pattern={"up_proj": 6.0})
    assert rank_and_scaling(settings, "model.layers.0.self_attn.q_proj") == (9, 8 / 9)
    assert rank_and_scaling(settings, "model.layers.0.mlp.up_proj") == (4, 1.5)
    root = LoraSettings(r=4, alpha=3.0, rslora=True, rank_pattern={"q_proj": 9})
    assert rank_and_scaling(root, "model.layers.0.self_attn.q_proj") == (9, 1.0)
    assert rank_and_scaling(root, "model.layers.0.self_attn.o_proj") == (4, 1.5)


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        (LoraSettings(targets=("k_proj",)), "targets", "q_proj, o_proj, up_proj"),
        (LoraSettings(targets=()), "targets", "at least one"),
        (LoraSettings(r=0), "r", "from 1"),
        (LoraSettings(r=10**9), "r", "from 1"),
        (LoraSettings(alpha=float("nan")), "alpha", "above 0"),
        (LoraSettings(alpha=-1.0), "alpha", "above 0"),
        (LoraSettings(alpha=9223372036854775807.0), "alpha", "at most 1e+09"),
        (LoraSettings(alpha=1e308), "alpha", "at most 1e+09"),
        (LoraSettings(alpha_pattern={"up_proj": 3.4e38}), "alpha_pattern", "at most 1e+09"),
        (LoraSettings(alpha=1e-320), "alpha", "least normal fp32 number"),
        (LoraSettings(alpha_pattern={"up_proj": 1e-39}), "alpha_pattern", "least normal fp32 number"),
        (LoraSettings(dropout=1e-320), "dropout", "least normal fp32 number"),
        (LoraSettings(dropout=1 - 1e-9), "dropout", "dropout"),
        (LoraSettings(dropout=1.0), "dropout", "dropout"),
        (LoraSettings(dropout=float("nan")), "dropout", "dropout"),
        (LoraSettings(init="pissa"), "init", "orthogonal"),
        (LoraSettings(r=3, init="orthogonal"), "init", "even"),
        (LoraSettings(r=4, rank_pattern={"q_proj": 3}, init="orthogonal"), "init", "even"),
        (LoraSettings(rank_pattern={"q_proj": 0}), "rank_pattern", "from 1"),
        (LoraSettings(rank_pattern={"(a+)+": 2}), "rank_pattern", "module's name"),
        (LoraSettings(rank_pattern={"down_proj": 2}), "rank_pattern", "none of the targeted"),
        (LoraSettings(targets=("q_proj",), alpha_pattern={"up_proj": 2.0}), "alpha_pattern", "none of the targeted"),
        (LoraSettings(alpha_pattern={"up_proj": float("inf")}), "alpha_pattern", "above 0"),
    ],
)
def test_wrong_settings_are_refused_with_their_field(settings: LoraSettings, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refused:
        resolve_targets(settings, BASE)
    assert refused.value.field == field
