"""Adapters trained on a language model fit the multimodal model that wraps it, and the other way round."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from coserve.cli import common
from coserve.cli.app import app
from coserve.core.errors import UnsupportedAdapter
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.lora.files.cartridge import EMBEDDINGS
from coserve.lora.files.wrapped import rename_decoder
from coserve.lora.store.files import load_adapter, save_adapter
from coserve.model.base import wrap_base
from tests.support.examples import in_turns
from tests.support.families import ATTENTION_ONLY, SERVED, tiny_family
from tests.support.lora_reference import adapted, alone, save_peft, tokens_of
from tests.support.sharded import Kind, whole_adapter

TEXT, WRAPPER = "ministral3", "mistral3"
NAMES = {TEXT: "model.", WRAPPER: "model.language_model."}
TOKENS = tokens_of(11)
WRAPPERS = [family for family in SERVED if "text_config" in CONFIG_MAPPING[family].sub_configs]
SETTINGS = {"r": 3, "target_modules": r".*layers\.\d+\.(self_attn\.[qv]_proj|mlp\.down_proj)", "lora_alpha": 5}
"""With a rank and an alpha of its own for one whole name."""


def _model(family: str) -> torch.nn.Module:
    """The same language model by itself and wrapped."""
    model, wrapped = tiny_family(family), tiny_family(WRAPPER)
    if family == TEXT:
        model.model.load_state_dict(wrapped.model.language_model.state_dict())
        model.lm_head.load_state_dict(wrapped.lm_head.state_dict())
    return model


def _saved(family: str, folder: Path) -> torch.Tensor:
    """Save an adapter of the family by PEFT; return its logits by PEFT."""
    one = NAMES[family].replace(".", r"\.") + r"layers\.1\.mlp\.down_proj"
    own = {"rank_pattern": {f"^{one}$": 5}, "alpha_pattern": {f"^{one}$": 7}}
    return alone(save_peft(_model(family), folder, **SETTINGS, **own), TOKENS)


def _rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    save_file({name.replace(old, new, 1): x for name, x in tensors.items()}, folder / ADAPTER_WEIGHTS)


@pytest.mark.parametrize(("trained", "served"), [(TEXT, WRAPPER), (WRAPPER, TEXT)])
def test_an_adapter_fits_the_other_model(trained: str, served: str, tmp_path: Path) -> None:
    """And what is written for the other model is read for the first one again."""
    expected = _saved(trained, tmp_path)
    base = wrap_base(_model(served), name="tiny")
    weights = load_adapter(tmp_path, base.spec, dtype=torch.float32)
    assert {pair.a_RD.shape[0] for pair in weights.sites.values()} == {3, 5}
    torch.testing.assert_close(adapted(base, weights, TOKENS), expected, rtol=1e-4, atol=1e-4)
    again = tmp_path / "again"
    again.mkdir()
    save_adapter(again, weights, base.spec)
    assert all(
        name.startswith(f"base_model.model.{NAMES[served]}layers.") for name in load_file(again / ADAPTER_WEIGHTS)
    )
    back = load_adapter(again, base.spec, dtype=torch.float32)
    assert {site: pair.scaling for site, pair in back.sites.items()} == {
        site: pair.scaling for site, pair in weights.sites.items()
    }


@pytest.mark.parametrize(("trained", "served"), [(TEXT, WRAPPER), (WRAPPER, TEXT)])
@pytest.mark.parametrize(
    "targets",
    [
        r".*(self_attn\.q_proj|mlp\.down_proj)",
        r".*(1\.mlp\.up_proj|embed_tokens|lm_head)",
        r"^DECODER.*(q_proj|up_proj)$",
    ],
)
def test_files_for_peft_on_the_other_model(
    trained: str,
    served: str,
    targets: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Saved by the base that trained it, loaded by PEFT on the other model: nothing is missing, and nothing else is
    adapted."""
    base = wrap_base(_model(trained), name="tiny")
    decoder = NAMES[trained].replace(".", r"\.")
    imported, targets = "DECODER" in targets, targets.replace("DECODER", decoder)
    one = rf"{decoder}layers\.1\.mlp\."
    own = {"rank_pattern": {rf"^{one}\w+$": 5}, "alpha_pattern": {rf"^{one}\w+$": 7}}
    trained_model = save_peft(_model(trained), tmp_path / "peft", r=3, target_modules=targets, **own)
    expected = alone(trained_model, TOKENS)
    weights = load_adapter(tmp_path / "peft", base.spec, dtype=torch.float32)

    def download(name: str, folder: Path) -> Path:
        if imported:  # adapters are kept as they came
            return shutil.copytree(tmp_path / "peft", folder)
        folder.mkdir()
        save_adapter(folder, weights, base.spec)
        return folder

    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(download_adapter=download)))
    command = ["adapters", "download", "poet", str(tmp_path / "ours"), "--decoder", NAMES[served].removesuffix(".")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    recwarn.clear()
    loaded = PeftModel.from_pretrained(_model(served), str(tmp_path / "ours")).eval()
    assert not [str(one.message) for one in recwarn if "adapter keys" in str(one.message)]
    torch.testing.assert_close(alone(loaded, TOKENS), expected, rtol=1e-4, atol=1e-4)
    again = load_adapter(tmp_path / "ours", base.spec, dtype=torch.float32)
    assert again.sites.keys() == weights.sites.keys()


@pytest.mark.parametrize("family", in_turns(WRAPPERS, [WRAPPER, "idefics3"]))
@pytest.mark.filterwarnings("ignore")
def test_files_for_peft_on_the_wrapper_itself(family: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Modules of the same names in its towers are left out."""
    base = wrap_base(tiny_family(family), name="tiny")
    kind = Kind(3, targets=base.spec.default_targets if family not in ATTENTION_ONLY else ("o_proj",))
    save_adapter(tmp_path, whole_adapter(base.spec, kind), base.spec)
    weights = load_adapter(tmp_path, base.spec, dtype=torch.float32)
    recwarn.clear()
    loaded = PeftModel.from_pretrained(tiny_family(family), str(tmp_path)).eval()
    assert not [str(one.message) for one in recwarn if "adapter keys" in str(one.message)]
    found = {name.partition(".lora_A.")[0] for name in loaded.state_dict() if ".lora_A." in name}
    assert found == {f"base_model.model.{site}" for site in weights.sites}
    torch.testing.assert_close(alone(loaded, TOKENS), adapted(base, weights, TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "chosen",
    [
        {"layers_to_transform": [1]},
        {"layers_to_transform": [1], "layers_pattern": ["layers"]},
        {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
        {"target_parameters": ["model.layers.1.mlp.up_proj.weight"]},
    ],
    ids=["layers", "pattern", "excluded", "parameters"],
)
def test_renamed_files_keep_what_they_adapt(
    chosen: dict[str, object], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Imported adapters are kept as they came: PEFT refuses chosen layers beside a regular expression, and finds
    neither a module nor a parameter by its whole name in another model."""
    trained = save_peft(_model(TEXT), tmp_path, r=3, target_modules=["q_proj"], **chosen)
    expected = alone(trained, TOKENS)
    rename_decoder(tmp_path, "model.language_model")
    recwarn.clear()
    loaded = PeftModel.from_pretrained(_model(WRAPPER), str(tmp_path)).eval()
    names = [name for name, _ in loaded.named_parameters() if ".lora_A." in name]
    assert len(names) == len([name for name, _ in trained.named_parameters() if ".lora_A." in name])
    assert not [str(one.message) for one in recwarn if "adapter keys" in str(one.message)]
    torch.testing.assert_close(alone(loaded, TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_a_cartridge_names_no_modules(tmp_path: Path) -> None:
    """Its files are the same for both models."""
    save_file({EMBEDDINGS: torch.ones(2, 8)}, tmp_path / ADAPTER_WEIGHTS)
    (tmp_path / ADAPTER_CONFIG).write_text('{"peft_type": "CARTRIDGE", "num_virtual_tokens": 2}')
    before = [(tmp_path / name).read_bytes() for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)]
    rename_decoder(tmp_path, "model.language_model")
    assert [(tmp_path / name).read_bytes() for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)] == before


def test_names_of_earlier_versions_of_transformers(tmp_path: Path) -> None:
    settings = SETTINGS | {"target_modules": r".*language_model.*\.(q_proj|down_proj)"}
    expected = alone(save_peft(_model(WRAPPER), tmp_path, **settings), TOKENS)
    _rename(tmp_path, "model.language_model.", "language_model.model.")
    base = wrap_base(_model(WRAPPER), name="tiny")
    weights = load_adapter(tmp_path, base.spec, dtype=torch.float32)
    torch.testing.assert_close(adapted(base, weights, TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_the_vision_tower_is_refused_by_name(tmp_path: Path) -> None:
    save_peft(_model(WRAPPER), tmp_path, r=2, target_modules=["q_proj"])  # also the tower's
    base = wrap_base(_model(WRAPPER), name="tiny")
    with pytest.raises(UnsupportedAdapter, match="vision_tower, but coserve runs the language model alone"):
        load_adapter(tmp_path, base.spec, dtype=torch.float32)
