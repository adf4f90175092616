"""PEFT files in and out: the real `peft` package and coserve compute the same logits from the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import BdLoraConfig, LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from coserve.core.errors import BaseMismatch, CorruptAdapter
from coserve.core.types import AdapterRef, LoraSettings
from coserve.finetune.init import new_adapter
from coserve.lora.files.peft import inspect_adapter
from coserve.lora.files.record import record_adapter
from coserve.lora.store.files import load_adapter, save_adapter
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraWeights
from coserve.state.registry.records import AdapterRecord
from tests.support.examples import examples, sample
from tests.support.finetuning import changing_adapter
from tests.support.lora_reference import adapted, alone, packed, save_peft, tokens_of
from tests.support.sized_adapters import same_adapter
from tests.support.tiny_models import tiny_model

TOKENS = tokens_of(11)


def _load(base: Base, folder: Path) -> LoraWeights:
    return load_adapter(folder, base.spec, dtype=torch.float32)


CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama-all": ("llama", {"r": 4, "target_modules": "all-linear"}),
    "llama-some": ("llama", {"r": 1, "lora_alpha": 3, "target_modules": ["v_proj", "layers.1.mlp.up_proj"]}),
    "llama-rslora": ("llama", {"r": 6, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
    "llama-patterns": (
        "llama",
        {
            "r": 4,
            "target_modules": ["q_proj", "o_proj", "up_proj"],
            "rank_pattern": {r"layers.0.self_attn.q_proj": 7, "^model.layers.1.mlp.up_proj$": 2, "o_proj": 3},
            "alpha_pattern": {"q_proj": 20, r"layers\.1\.mlp\.up_proj": 5},
        },
    ),
    "llama-layers": ("llama", {"r": 4, "target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "llama-exclude": (
        "llama",
        {"r": 4, "target_modules": ["q_proj", "k_proj"], "exclude_modules": ["0.self_attn.q_proj"]},
    ),
    "llama-gaussian": ("llama", {"r": 4, "target_modules": ["gate_proj"], "init_lora_weights": "gaussian"}),
    "gpt2-dora": (
        "gpt2",
        {"r": 3, "target_modules": ["c_attn", "c_proj"], "use_dora": True, "use_rslora": True, "fan_in_fan_out": True},
    ),
    "llama-bd": (
        "llama",
        {
            "r": 8,
            "target_modules": ["q_proj", "k_proj", "o_proj", "down_proj"],
            "use_bdlora": BdLoraConfig(
                nblocks=2, target_modules_bd_a=["o_proj", "down_proj"], target_modules_bd_b=["q_proj", "k_proj"]
            ),
        },
    ),
    "llama-bd-all": (
        "llama",
        {
            "r": 8,
            "use_rslora": True,
            "target_modules": "all-linear",
            "rank_pattern": {"down_proj": 4},
            "alpha_pattern": {"0.self_attn.q_proj": 3},
            "use_bdlora": BdLoraConfig(
                nblocks=4,
                target_modules_bd_a=["o_proj", "down_proj"],
                target_modules_bd_b=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
            ),
        },
    ),
    "llama-bd-parts-of-paths": (  # PEFT looks for its patterns anywhere in a module's path
        "llama",
        {
            "r": 6,
            "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"],
            "use_bdlora": BdLoraConfig(
                nblocks=2, target_modules_bd_a=["layers.1.self_attn"], target_modules_bd_b=["mlp"], match_strict=False
            ),
        },
    ),
    "llama-bd-one-block": (
        "llama",
        {
            "r": 3,
            "target_modules": ["q_proj", "down_proj"],
            "use_bdlora": BdLoraConfig(target_modules_bd_a=["down_proj"], target_modules_bd_b=["q_proj"]),
        },
    ),
    "phi-bd": (
        "phi",
        {
            "r": 4,
            "target_modules": ["q_proj", "dense", "fc1", "fc2"],
            "use_bdlora": BdLoraConfig(
                nblocks=2, target_modules_bd_a=["dense", "fc2"], target_modules_bd_b=["q_proj", "fc1"]
            ),
        },
    ),
    "gpt2-fused": ("gpt2", {"r": 5, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "gpt2-all": (
        "gpt2",
        {
            "r": 4,
            "target_modules": ["c_attn", "c_proj", "c_fc"],
            "fan_in_fan_out": True,
            "rank_pattern": {"mlp.c_proj": 2},
            "alpha_pattern": {"h.0.attn.c_attn": 1},
            "use_rslora": True,
        },
    ),
    "qwen3": ("qwen3", {"r": 3, "target_modules": ["k_proj", "v_proj", "gate_proj"], "rank_pattern": {"k_proj": 9}}),
    "llama-regex": (
        "llama",
        {
            "r": 4,
            "target_modules": r"(?:.*?(?:language|text).*?(?:q_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|o_proj|up_proj)))",  # noqa: E501
            "exclude_modules": r".*\.1\..*o_proj",
            "rank_pattern": {r"layers\.(?:0|[2-9])\..*": 7, "o_proj|up_proj": 2},
            "alpha_pattern": {r".*attn\.[qk]_proj": 20, r"layers\.\d+\.mlp\..*?": 5, "o_proj": 3},
            "use_rslora": True,
        },
    ),
    "llama-unmatched-ranks": (
        "llama",
        {
            "r": 4,
            "target_modules": r"(?=.*attn).*\.[qv]_proj",
            "rank_pattern": {r"(?!.*v_proj).*layers\.1.*": 5},
            "alpha_pattern": {"v_proj": 3.5},
        },
    ),
    "llama-layers-pattern": (
        "llama",
        {"r": 4, "target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "lay[a-z]+"},
    ),
    "phi3-fused": ("phi3", {"r": 3, "target_modules": ["qkv_proj", "gate_up_proj"]}),
}
QUICK = ("llama-all", "llama-patterns", "llama-bd-all", "gpt2-all", "llama-regex", "phi3-fused")


@pytest.mark.parametrize("case", sample(CASES.keys(), *QUICK))
def test_a_peft_adapter_gives_pefts_logits(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    peft_model = save_peft(tiny_model(family), tmp_path, **settings)
    base = wrap_base(tiny_model(family), name="tiny")
    want = alone(peft_model, TOKENS)
    torch.testing.assert_close(adapted(base, _load(base, tmp_path), TOKENS), want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(want, packed(base, [TOKENS])[0], atol=1e-3)


_SITE_PATTERNS = st.sampled_from(
    [
        *(r".*q_proj", r"layers\.0\..*", "self_attn.[qv]_proj", r"(?:.*\.)?mlp\.(?:up|down)_proj", r"\w+_proj"),
        *("model|v_proj", r"^model\.layers\.\d\.mlp.*$", "up_proj", r"[^.]*\.[^.]*_proj", r"(?!.*mlp).*_proj"),
    ]
)


@pytest.mark.parametrize("case", sample(CASES.keys(), *QUICK))
def test_a_registered_adapter_is_loaded_without_matching_a_pattern(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config = CASES[case]
    save_peft(tiny_model(family), tmp_path, **config)
    base = wrap_base(tiny_model(family), name="tiny")
    matched = _load(base, tmp_path)
    record = record_adapter(tmp_path, AdapterRef("a", 1), base.spec, source="import", created_at=0.0)
    assert bool(record.alphas) == bool(config.get("alpha_pattern"))
    content = msgspec.msgpack.encode(record)
    assert msgspec.msgpack.decode(content, type=AdapterRecord) == record
    old = {key: value for key, value in msgspec.msgpack.decode(content).items() if key != "alphas"}
    assert msgspec.convert(old, AdapterRecord).digests.alphas is None
    monkeypatch.setattr("coserve.lora.files.peft.Matching", None)
    with pytest.raises(TypeError):  # as a record of an earlier version
        _load(base, tmp_path)
    known = load_adapter(tmp_path, base.spec, dtype=torch.float32, digests=record.digests)
    assert known.settings == matched.settings
    assert same_adapter(known, matched)


def test_alphas_of_other_modules_are_refused(saved: tuple[Base, Path]) -> None:
    base, folder = saved
    record = record_adapter(folder, AdapterRef("a", 1), base.spec, source="import", created_at=0.0)
    digests = msgspec.structs.replace(record.digests, alphas=(1.0,))
    with pytest.raises(CorruptAdapter, match="expected 1 adapted modules"):
        load_adapter(folder, base.spec, dtype=torch.float32, digests=digests)


@settings(max_examples=examples(8), deadline=None)
@given(
    ranks=st.dictionaries(_SITE_PATTERNS, st.integers(1, 9), max_size=3),
    alphas=st.dictionaries(_SITE_PATTERNS.filter(lambda p: "(?!" not in p), st.integers(1, 30), max_size=3),
    rslora=st.booleans(),
)
def test_random_patterns_give_pefts_logits(ranks: dict[str, int], alphas: dict[str, float], rslora: bool) -> None:
    model, base = tiny_model("llama"), wrap_base(tiny_model("llama"), name="tiny")
    # PEFT saves its patterns sorted, and the first that matches counts.
    patterns = {"rank_pattern": dict(sorted(ranks.items())), "alpha_pattern": dict(sorted(alphas.items()))}
    with TemporaryDirectory() as folder:
        peft_model = save_peft(
            model, Path(folder), r=4, target_modules=r".*\.(?:q|v|up|down)_proj", use_rslora=rslora, **patterns
        )
        got = adapted(base, _load(base, Path(folder)), TOKENS)
    torch.testing.assert_close(got, alone(peft_model, TOKENS), rtol=1e-4, atol=1e-4)


def test_a_trainers_checkpoint_is_an_adapter(tmp_path: Path) -> None:
    """As transformers' Trainer writes it, with pickles of its own state; its parent says where the adapters are."""
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model("llama"), config)
    arguments = TrainingArguments(str(tmp_path), max_steps=2, save_steps=1, report_to="none", use_cpu=True)
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 2
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    folder = tmp_path / "checkpoint-2"
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"} <= {p.name for p in folder.iterdir()}
    base = wrap_base(tiny_model("llama"), name="tiny")
    got = adapted(base, _load(base, folder), TOKENS)
    torch.testing.assert_close(got, alone(model.eval(), TOKENS), rtol=1e-4, atol=1e-4)
    with pytest.raises(CorruptAdapter, match="such as checkpoint-2"):
        _load(base, tmp_path)


@pytest.mark.parametrize("case", sample(CASES.keys(), *QUICK))
def test_what_coserve_saves_peft_loads(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    save_peft(tiny_model(family), tmp_path / "in", **settings)
    base = wrap_base(tiny_model(family), name="tiny")
    weights = _load(base, tmp_path / "in")
    save_adapter(tmp_path / "out", weights, base.spec)
    # It warns of missing or unexpected tensors and unknown keys: an error here.
    peft_model = PeftModel.from_pretrained(tiny_model(family), str(tmp_path / "out")).eval()
    want = alone(peft_model, TOKENS)
    torch.testing.assert_close(adapted(base, weights, TOKENS), want, rtol=1e-4, atol=1e-4)
    again = _load(base, tmp_path / "out")
    assert torch.equal(adapted(base, again, TOKENS), adapted(base, weights, TOKENS))
    assert same_adapter(again, weights)


@pytest.mark.parametrize(("hub_name", "asked"), [(None, []), ("owner/base", ["owner/base"])])
def test_peft_looks_up_a_base_on_the_hub_only_if_it_comes_from_there(
    hub_name: str | None, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it saves again an adapter that came from here."""
    looked_up: list[str] = []

    def exists(id: str, *_: object) -> bool:
        looked_up.append(id)
        return False

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", exists)
    model, base = tiny_model("llama"), wrap_base(tiny_model("llama"), name="bundled", hub_name=hub_name)
    weights = new_adapter(LoraSettings(r=2), base.spec, seed=1, dtype=torch.float32, device="cpu")
    (tmp_path / "ours").mkdir()
    save_adapter(tmp_path / "ours", weights, base.spec)
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == hub_name
    PeftModel.from_pretrained(model, str(tmp_path / "ours")).save_pretrained(str(tmp_path / "again"))
    assert looked_up == asked


@pytest.mark.parametrize(
    "settings",
    [
        LoraSettings(),
        LoraSettings(r=3, alpha=7.5, rslora=True, dropout=0.1, targets=("q_proj", "down_proj")),
        LoraSettings(r=2, targets=("model.layers.1.mlp.up_proj",), init="gaussian"),
        LoraSettings(r=2, rank_pattern={"q_proj": 6}, alpha_pattern={"0.self_attn.q_proj": 9.0}, init="orthogonal"),
        LoraSettings(r=8, rslora=True, bd_blocks=4),
        LoraSettings(r=4, bd_blocks=2, targets=("q_proj", "k_proj", "v_proj", "o_proj"), init="orthogonal"),
        LoraSettings(r=4, bd_blocks=2, targets=("gate_proj", "up_proj", "down_proj"), rank_pattern={"up_proj": 2}),
        LoraSettings(r=4, bd_blocks=2, targets_bd_a=("mlp",), targets_bd_b=("0.self_attn",)),
    ],
    ids=["default", "rslora", "one", "patterns", "bd", "bd-attention", "bd-mlp", "bd-lists"],
)
def test_a_new_adapter_survives_its_files(settings: LoraSettings, tmp_path: Path) -> None:
    base = wrap_base(tiny_model("llama"), name="tiny")
    weights = changing_adapter(base, settings, scale=1.0)
    save_adapter(tmp_path, weights, base.spec)
    again = _load(base, tmp_path)
    assert same_adapter(again, weights)
    info = inspect_adapter(tmp_path, base.spec)
    assert info.rank == max(pair.rank for pair in weights.sites.values())
    assert info.alpha == (2 * settings.r if settings.alpha is None else settings.alpha)
    assert info.settings.dropout == settings.dropout
    assert {site: (shape.rank, shape.scaling) for site, shape in info.sites.items()} == {
        site: (pair.rank, pair.scaling) for site, pair in weights.sites.items()
    }
    peft_model = PeftModel.from_pretrained(tiny_model("llama"), str(tmp_path)).eval()
    torch.testing.assert_close(adapted(base, weights, TOKENS), alone(peft_model, TOKENS), rtol=1e-4, atol=1e-4)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Base, Path]:
    base = wrap_base(tiny_model("llama"), name="tiny")
    save_adapter(tmp_path, changing_adapter(base, LoraSettings(r=2)), base.spec)
    return base, tmp_path


def test_an_adapter_of_another_base_is_refused(saved: tuple[Base, Path]) -> None:
    _, folder = saved
    for other in (tiny_model("llama", seed=1), tiny_model("gpt2"), tiny_model("llama", num_hidden_layers=1)):
        with pytest.raises(BaseMismatch):
            load_adapter(folder, wrap_base(other, name="other").spec, dtype=torch.float32)


def test_the_name_of_the_base_is_only_a_hint(saved: tuple[Base, Path]) -> None:
    base, folder = saved
    renamed = msgspec.structs.replace(base.spec, name="another-name")
    assert load_adapter(folder, renamed, dtype=torch.float32).sites
