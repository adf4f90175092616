"""Adapter intake: what coserve doesn't implement, or what is damaged or hostile, is refused by name before it is
used."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from coserve.core.errors import (
    AdapterError,
    BaseMismatch,
    CorruptAdapter,
    ShapeMismatch,
    UnsafeAdapter,
    UnsupportedAdapter,
)
from coserve.core.types import LoraSettings, SiteSpec
from coserve.lora.files.peft import adapter_config, inspect_adapter
from coserve.lora.files.targets import MAX_ALPHA, resolve_targets
from coserve.lora.files.tensorfile import MAX_HEADER
from tests.support.examples import examples
from tests.support.records import make_base_spec

SITES = {f"model.layers.{i}.self_attn.{name}": SiteSpec(8, 8, i) for i in (0, 1) for name in ("q_proj", "v_proj")}
BASE = make_base_spec(SITES, eos_token_ids=(2,))
PREFIX = "base_model.model.model.layers.0.self_attn."
CONFIG: dict[str, object] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}

Tensor = tuple[str, list[int], bytes]


def tensors(rank: int = 2) -> dict[str, Tensor]:
    return {
        f"{PREFIX}q_proj.lora_A.weight": ("F32", [rank, 8], bytes(4 * rank * 8)),
        f"{PREFIX}q_proj.lora_B.weight": ("F32", [8, rank], bytes(4 * rank * 8)),
    }


def weights(content: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at, data = 0, b""
    for name, (dtype, shape, raw) in content.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at, data = at + len(raw), data + raw
    return framed(json.dumps(header).encode()) + data


def framed(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def write(folder: Path, config: object = CONFIG, file: bytes | None = None) -> Path:
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(weights(tensors()) if file is None else file)
    return folder


def test_a_plain_adapter_passes(tmp_path: Path) -> None:
    info = inspect_adapter(write(tmp_path), BASE)
    assert (info.rank, info.alpha, info.targets) == (2, 8.0, ("model.layers.0.self_attn.q_proj",))
    assert info.sites["model.layers.0.self_attn.q_proj"].scaling == 4.0
    assert info.bytes == (tmp_path / "adapter_model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("use_dora", "yes"),
        ("lora_bias", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("alora_invocation_tokens", [5]),
        ("modules_to_save", "lm_head"),
        ("trainable_token_indices", [-1]),
        ("trainable_token_indices", {"embed_tokens": [1.5]}),
        ("target_parameters", "mlp.experts.gate_up_proj"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("loftq_config", {"loftq_bits": 4}),
        ("corda_config", {"x": 1}),
        ("lora_ga_config", {"scale": "stable"}),
        ("use_qalora", True),
        ("layer_replication", [[0, 2]]),
        ("megatron_config", {"x": 1}),
        ("arrow_config", {"x": 1}),
        ("kasa_config", {"x": 1}),
        ("monteclora_config", {"x": 1}),
        ("target_modules", ""),
        ("target_modules", [""]),
        ("target_modules", [3]),
        ("exclude_modules", [3]),
        ("layers_pattern", [3]),
        ("auto_map", {"AutoModel": "evil.Model"}),
        ("a_variant_of_tomorrow", True),
        ("a_variant_of_tomorrow", {"strength": 1}),
        ("r", 0),
        ("r", True),
        ("r", 2.0),
        ("r", "2"),
        ("lora_alpha", "8"),
        ("lora_alpha", 10**400),
        ("lora_alpha", 2 * MAX_ALPHA),
        ("alpha_pattern", {"q_proj": 2 * MAX_ALPHA}),
        ("use_rslora", 1),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": None}),
        ("alpha_pattern", {"(?=q)q_proj": 3}),
        ("alpha_pattern", {r"(q)_proj|\1": 3}),
        ("use_bdlora", {"nblocks": 0}),
        ("use_bdlora", {"nblocks": 129}),
        ("use_bdlora", {"nblocks": 2, "new": 1}),
        ("use_bdlora", True),
        ("lora_dropout", 2),
    ],
)
def test_a_config_that_is_not_implemented_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(UnsupportedAdapter, match=key) as refused:
        inspect_adapter(write(tmp_path, CONFIG | {key: value}), BASE)
    assert refused.value.field == key
    assert len(str(refused.value)) < 400
    assert key != "r" or "expected a whole number of at least 1" in refused.value.message


def test_a_rank_that_no_table_of_the_kernels_holds_is_refused(tmp_path: Path) -> None:
    rank = 1 << 16
    write(tmp_path, CONFIG | {"r": rank}, weights(tensors(rank)))
    with pytest.raises(UnsupportedAdapter, match="expected a rank of at most 65535, got 65536") as refused:
        inspect_adapter(tmp_path, BASE)
    assert refused.value.field == "r"


def test_many_regular_expressions_are_refused_by_name(tmp_path: Path) -> None:
    config = CONFIG | {"alpha_pattern": {f"(a|b){i}": 3 for i in range(9_000)}}
    with pytest.raises(UnsupportedAdapter, match="alpha_pattern: expected at most 64 regular expressions") as refused:
        inspect_adapter(write(tmp_path, config), BASE)
    assert refused.value.field == "alpha_pattern"


def test_what_may_be_submitted_may_be_imported(tmp_path: Path) -> None:
    (site, *_) = SITES
    lora = LoraSettings(r=2, alpha=MAX_ALPHA, targets=(site,), alpha_pattern={"q_proj": MAX_ALPHA})
    config = adapter_config(lora, BASE, resolve_targets(lora, BASE))
    assert inspect_adapter(write(tmp_path, config), BASE).alpha == MAX_ALPHA


@pytest.mark.parametrize("key", sorted(LoraConfig().to_dict()))
def test_every_key_of_pefts_is_gated(tmp_path: Path, key: str) -> None:
    """A value that no key means anything by is accepted only where the key has no effect."""
    harmless = {
        *("target_modules", "exclude_modules", "layers_pattern", "velora_config", "eva_config"),
        *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version", "megatron_core"),
        "qalora_group_size",
    }
    write(tmp_path, CONFIG | {key: ".*q_proj" if key == "target_modules" else "nonsense"})
    if key in harmless:
        assert inspect_adapter(tmp_path, BASE).rank == 2
    else:
        with pytest.raises(UnsupportedAdapter, match=key):
            inspect_adapter(tmp_path, BASE)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '"x"', '{"peft_type": "LORA", "peft_type": "LORA"}'),
        *('{"peft_type": "LORA", "lora_alpha": NaN}', "[" * 100_000, '{"a":' * 100_000, '{"r": ' + "9" * 5000 + "}"),
        *("\ufeff{}", " " * ((1 << 20) + 1)),
    ],
    ids=["empty", "list", "open", "text", "twice", "nan", "deep", "deeper", "long", "mark", "large"],
)
def test_a_config_that_is_not_an_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(CorruptAdapter, match=r"adapter_config\.json"):
        inspect_adapter(write(tmp_path, text), BASE)


A, B = f"{PREFIX}q_proj.lora_A.weight", f"{PREFIX}q_proj.lora_B.weight"


def _with(name: str, tensor: Tensor) -> bytes:
    return weights(tensors() | {name: tensor})


def _without(name: str) -> bytes:
    return weights({key: value for key, value in tensors().items() if key != name})


ONE: Tensor = ("F32", [1], bytes(4))
BAD_TENSORS: dict[str, tuple[bytes, type[AdapterError], str]] = {
    "no tensors": (weights({}), CorruptAdapter, "no tensors"),
    "no A": (_without(A), CorruptAdapter, "both"),
    "no B": (_without(B), CorruptAdapter, "both"),
    "dora": (_with(f"{PREFIX}q_proj.lora_magnitude_vector", ONE), CorruptAdapter, "with use_dora = false"),
    "bias": (_with(f"{PREFIX}q_proj.lora_B.bias", ONE), UnsupportedAdapter, "bias"),
    "base": (_with(f"{PREFIX}q_proj.base_layer.bias", ONE), UnsupportedAdapter, "base itself"),
    "head": (_with("base_model.model.lm_head.weight", ONE), UnsupportedAdapter, "several GPUs"),
    "lora head": (_with("base_model.model.lm_head.lora_A.weight", ONE), UnsupportedAdapter, "decoder layers"),
    "embedding": (_with("base_model.model.model.embed_tokens.lora_embedding_A", ONE), UnsupportedAdapter, "embedding"),
    "prefix": (_with("model.layers.0.self_attn.q_proj.lora_A.weight", ONE), UnsupportedAdapter, "expected only"),
    "named": (_with(f"{PREFIX}q_proj.lora_A.default.weight", ONE), UnsupportedAdapter, "expected only"),
    "extra": (_with("surprise", ONE), UnsupportedAdapter, "surprise"),
    "layer": (_with(A.replace("layers.0", "layers.7"), ONE), BaseMismatch, "no such module"),
    "family": (_with("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", ONE), BaseMismatch, "no such"),
    "rank": (weights(tensors(rank=3)), ShapeMismatch, "expected shape"),
    "shape A": (_with(A, ("F32", [2, 9], bytes(72))), ShapeMismatch, "lora_A"),
    "shape B": (_with(B, ("F32", [9, 2], bytes(72))), ShapeMismatch, "lora_B"),
    "flat": (_with(A, ("F32", [16], bytes(64))), ShapeMismatch, "lora_A"),
    "type": (_with(A, ("I32", [2, 8], bytes(64))), UnsupportedAdapter, "F32"),
    "double": (_with(A, ("F64", [2, 8], bytes(128))), UnsupportedAdapter, "F32"),
    "short": (_with(A, ("F32", [2, 8], bytes(60))), CorruptAdapter, "fill"),
    "long": (_with(A, ("F32", [2, 8], bytes(68))), CorruptAdapter, "fill"),
    "empty": (_with(A, ("F32", [0, 8], b"")), ShapeMismatch, "lora_A"),
    "other base": (weights(tensors(), {"coserve.base_fingerprint": "0" * 64}), BaseMismatch, "another base"),
    "other site": (
        weights({k.replace("q_proj", "v_proj"): v for k, v in tensors().items()}),
        CorruptAdapter,
        "does not target",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, case: str) -> None:
    file, error, message = BAD_TENSORS[case]
    with pytest.raises(error, match=message):
        inspect_adapter(write(tmp_path, file=file), BASE)


def test_the_fingerprint_of_this_base_passes(tmp_path: Path) -> None:
    file = weights(tensors(), {"format": "pt", "coserve.base_fingerprint": BASE.fingerprint})
    assert inspect_adapter(write(tmp_path, file=file), BASE).rank == 2


def _entry(**changes: object) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]} | changes
    other = {"dtype": "F32", "shape": [8, 2], "data_offsets": [64, 128]}
    return framed(json.dumps({A: entry, B: other}).encode()) + bytes(128)


GOOD = weights(tensors())
BAD_FILES: dict[str, bytes] = {
    "nothing": b"",
    "seven": b"\x01" * 7,
    "length beyond the file": struct.pack("<Q", 1000) + b"{}",
    "length of 2^63": struct.pack("<Q", 1 << 63) + b"{}",
    "length beyond the limit": struct.pack("<Q", MAX_HEADER + 1) + b" " * (MAX_HEADER + 1),
    "not JSON": framed(b"xx"),
    "not UTF-8": framed(b'{"\xff": 1}'),
    "list": framed(b"[]"),
    "deep": framed(b'{"a":' * 100_000),
    "twice": framed(b'{"a": 1, "a": 1}'),
    "truncated": GOOD[:-1],
    "longer": GOOD + b"x",
    "hole": _entry(data_offsets=[4, 68]),
    "overlap": _entry(data_offsets=[32, 96]),
    "beyond": _entry(data_offsets=[128, 192]),
    "backwards": _entry(data_offsets=[64, 0]),
    "negative": _entry(data_offsets=[-64, 0]),
    "negative shape": _entry(shape=[-2, -8]),
    "huge shape": _entry(shape=[1 << 62, 1 << 62]),
    "huge number": _entry(shape=[10**300, 8]),
    "true": _entry(shape=[True, 16]),
    "float": _entry(shape=[2.0, 8]),
    "text": _entry(shape="28"),
    "one offset": _entry(data_offsets=[64]),
    "extra key": _entry(extra=1),
    "no type": framed(json.dumps({A: {"shape": [2, 8], "data_offsets": [0, 64]}}).encode()) + bytes(64),
    "many dimensions": _entry(shape=[1] * 100 + [16]),
    "metadata": framed(b'{"__metadata__": {"a": 1}}'),
    "pickle": b"\x80\x04\x95" + bytes(100),
    "zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_damaged_files_are_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(CorruptAdapter):
        inspect_adapter(write(tmp_path, file=BAD_FILES[case]), BASE)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_a_mutated_file_is_refused_or_still_fits(tmp_path: Path, at: int, value: int, cut: int) -> None:
    mutated = bytearray(GOOD[: len(GOOD) - cut])
    mutated[at % len(mutated)] = value
    try:
        info = inspect_adapter(write(tmp_path, file=bytes(mutated)), BASE)
    except AdapterError:
        return
    assert cut == 0
    assert set(info.sites) <= set(SITES)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(sorted(LoraConfig().to_dict())) | st.text(max_size=8), json_values, max_size=4))
def test_any_config_gives_an_answer_or_a_typed_error(tmp_path: Path, changes: dict[str, object]) -> None:
    write(tmp_path, CONFIG | changes)
    try:
        inspect_adapter(tmp_path, BASE)
    except AdapterError as error:
        assert str(tmp_path) not in str(error)


@pytest.mark.parametrize("name", ["adapter_model.bin", "a.PT", "a.pth", "a.pkl", "a.ckpt", "my_optimizer.pt"])
def test_pickles_are_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    os.mkfifo(tmp_path / name)  # opening it would block
    with pytest.raises(UnsafeAdapter, match="safetensors"):
        inspect_adapter(tmp_path, BASE)


def _link(path: Path) -> None:
    target = path.with_suffix(".target")
    path.rename(target)
    path.symlink_to(target)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("make", [_link, _pipe, _folder])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_and_devices_are_refused(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(write(tmp_path) / name)
    with pytest.raises(UnsafeAdapter, match="regular file"):
        inspect_adapter(tmp_path, BASE)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    (write(tmp_path) / name).unlink()
    with pytest.raises(CorruptAdapter, match=name):
        inspect_adapter(tmp_path, BASE)


def test_a_missing_folder_is_refused_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(CorruptAdapter) as refused:
        inspect_adapter(tmp_path / "nowhere", BASE)
    assert str(tmp_path) not in str(refused.value)


LONG = {
    "one long name": "a" * 100_000,
    "nested stars": "(a*)*" * 20_000,
    "catastrophic": "(?:(?:a|a)+)+" * 8_000,
    "nested groups": "(" * 50_000 + ")" * 50_000,
    "counts": "a{1000}" * 14_000,
    "counts of counts": "((a{100}){100}){100}",
    "alternatives": "|".join(f"x{i}" for i in range(14_000)),
    "any": ".*.*.*" * 16_000 + "x",
}


@pytest.mark.parametrize("case", LONG)
def test_a_long_pattern_is_refused_where_it_matters_and_costs_bounded_steps(tmp_path: Path, case: str) -> None:
    """A backtracking match would never end. Of ranks and targets the tensors tell."""
    config = CONFIG | {"rank_pattern": {LONG[case]: 3}, "target_modules": f".*(?:_proj|{LONG[case]})"}
    assert inspect_adapter(write(tmp_path, config), BASE).rank == 2
    config = CONFIG | {"alpha_pattern": {LONG[case]: 3}}
    try:
        assert inspect_adapter(write(tmp_path, config), BASE).alpha == 8.0
    except UnsupportedAdapter as error:
        assert error.field == "alpha_pattern"
        assert len(str(error)) < 400


def test_settings_that_ask_for_nothing_pass_as_other_tools_write_them(tmp_path: Path) -> None:
    """Null and default fields of PEFT 0.13 to 0.21, of Unsloth, LLaMA-Factory, TRL, ms-swift and Megatron's export."""
    unsloth = r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))"  # noqa: E501
    off = dict.fromkeys(
        [
            *("alora_invocation_tokens", "arrow_config", "corda_config", "eva_config", "exclude_modules"),
            *("kasa_config", "layer_replication", "layers_pattern", "layers_to_transform", "loftq_config"),
            *("lora_ga_config", "megatron_config", "modules_to_save", "revision", "monteclora_config"),
            *("target_parameters", "trainable_token_indices", "use_bdlora", "velora_config", "lora_dtype"),
            *("lorap_lr_ratio", "enable_lora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
            *("init_lora_weights", "use_rslora"),
        ]
    )
    empty = {
        "loftq_config": {},
        "exclude_modules": [],
        "target_parameters": [],
        "rank_pattern": {},
        "layers_pattern": [],
    }
    extra = {
        "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "x", "unsloth_fixed": True},
        "ensure_weight_tying": False,
        "inference_mode": True,
        "lora_bias": False,
        "lorap_emb_lr": 1e-6,
        "megatron_core": "megatron.core",
        "merge_weights": False,
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "use_dora": False,
        "use_qalora": False,
        "a_variant_of_tomorrow": None,
        "another_of_tomorrow": False,
        "a_third_of_tomorrow": {},
    }
    for targets in (unsloth, "all-linear", None, ["q_proj"]):
        for changes in (off, empty):
            write(tmp_path, CONFIG | off | extra | changes | {"target_modules": targets})
            info = inspect_adapter(tmp_path, BASE)
            assert list(info.sites) == ["model.layers.0.self_attn.q_proj"]
            assert info.targets == ("model.layers.0.self_attn.q_proj",)


def _bits(dtype: str, value: float) -> bytes:
    return torch.full((2, 8), value, dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("stored", "kind", "base", "value", "fits"),
    [
        ("float32", "F32", "float32", math.nan, False),
        ("float32", "F32", "float32", -math.inf, False),
        ("float32", "F32", "float32", 3.4e38, True),
        ("float32", "F32", "bfloat16", 3.3895e38, True),
        ("float32", "F32", "bfloat16", -3.4e38, False),
        ("float32", "F32", "float16", 65519.9, True),
        ("float32", "F32", "float16", 65520.0, False),
        ("bfloat16", "BF16", "bfloat16", math.nan, False),
        ("bfloat16", "BF16", "float32", 3.38e38, True),
        ("bfloat16", "BF16", "float16", -65280.0, True),
        ("bfloat16", "BF16", "float16", 65536.0, False),
        ("float16", "F16", "bfloat16", 65504.0, True),
        ("float16", "F16", "float32", math.inf, False),
    ],
)
def test_weights_that_are_not_finite_in_the_bases_dtype_are_refused_at_import(
    tmp_path: Path, stored: str, kind: str, base: str, value: float, fits: bool
) -> None:
    loaded = torch.full((1,), value, dtype=getattr(torch, stored)).to(getattr(torch, base))
    assert bool(loaded.isfinite()) == fits, "torch agrees"
    write(tmp_path, file=_with(A, (kind, [2, 8], _bits(stored, value))))
    spec = msgspec.structs.replace(BASE, dtype=base)
    if fits:
        assert inspect_adapter(tmp_path, spec).rank == 2
    else:
        with pytest.raises(CorruptAdapter, match=f"q_proj.*finite in {base}"):
            inspect_adapter(tmp_path, spec)


def test_the_gate_needs_no_torch() -> None:
    code = "import sys, coserve.lora.files.peft, coserve.lora.files.targets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0
