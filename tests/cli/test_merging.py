"""`coserve adapters merge` against PEFT's own answers."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from typer.testing import CliRunner

from coserve.cli import common
from coserve.cli.app import app
from coserve.core.errors import UnsupportedAdapter, UnsupportedBase
from coserve.core.names import ADAPTER_CONFIG as CONFIG
from coserve.core.names import ADAPTER_WEIGHTS as FILE
from coserve.lora.files.wrapped import rename_decoder
from tests.support import quantised
from tests.support.families import tiny_family
from tests.support.gguf_files import write_llama
from tests.support.lora_reference import alone, save_peft, tokens_of

TINY = str(resources.files("coserve") / "assets" / "tiny")


@pytest.mark.parametrize("kind", ["bundled", "gguf"])
def test_a_merged_base_answers_as_the_base_with_its_adapter(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config).eval()

    def download(name: str, folder: Path) -> Path:
        assert name == "poet@2"
        model.save_pretrained(folder)
        return folder

    source = "bundled"
    if kind == "gguf":  # of an architecture that transformers has no table of
        source = str(tmp_path_factory.mktemp("gguf") / "base.gguf")
        plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        tokenizer = Path(TINY, "tokenizer.json")
        write_llama(Path(source), plain, GGMLQuantizationType.F16, tokenizer=tokenizer, architecture="mistral3")
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(download_adapter=download)))
    monkeypatch.setattr(logging.getLogger("bitsandbytes"), "level", logging.NOTSET)
    command = ["adapters", "merge", "poet@2", str(tmp_path / "poet"), "--base", source]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    assert not logging.getLogger("bitsandbytes.backends").isEnabledFor(logging.WARNING)  # of kernels not used here
    assert "quantization_config" not in (tmp_path / "poet" / "config.json").read_text()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "poet", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path / "poet")("The with statement", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = model(ids).logits
        with model.disable_adapter():
            change = (model(ids).logits - expected).norm()
        assert (merged(ids).logits - expected).norm() < 0.02 * change, "the base's files have 16 bits"
    assert [entry.name for entry in tmp_path.iterdir()] == ["poet"]
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, FileExistsError) and "exists already" in str(again.exception)


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["q_proj", "embed_tokens", "lm_head"]])
def test_lora_of_an_embedding_or_head_that_share_a_weight_changes_its_own_side(
    targets: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    change, expected = list[torch.Tensor](), list[torch.Tensor]()

    def download(name: str, folder: Path) -> Path:
        plain = alone(base, tokens_of(9))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected.append(alone(save_peft(base, folder, target_modules=targets), tokens_of(9)))
        change.append(expected[0] - plain)
        return folder

    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(download_adapter=download)))
    result = CliRunner().invoke(app, ["adapters", "merge", "poet", str(tmp_path / "poet"), "--base", "bundled"])
    assert result.exit_code == 0, result.exception
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "poet", dtype=torch.float32)
    assert not merged.config.tie_word_embeddings
    assert (alone(merged, tokens_of(9)) - expected[0]).norm() < 0.02 * change[0].norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mistral3", "qwen3_5"])  # the second is served by a class for text alone
@pytest.mark.parametrize("decoder", ["model.language_model", "model"])
def test_a_multimodal_base_keeps_its_class(
    family: str, decoder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tiny_family(family).config
    if config.get_text_config() is config:
        towers = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
        towers["out_hidden_size"] = config.hidden_size
        config = CONFIG_MAPPING[family](text_config=config.to_dict(), vision_config=towers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(str(tmp_path / "base"))
    shutil.copy(Path(TINY, "tokenizer.json"), tmp_path / "base")

    def download(name: str, folder: Path) -> Path:
        targets = r".*language_model.*(q_proj|down_proj)"
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
        expected.append(alone(save_peft(model, folder, target_modules=targets), tokens_of(9)))
        rename_decoder(folder, decoder)
        return folder

    expected: list[torch.Tensor] = []
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(download_adapter=download)))
    command = ["adapters", "merge", "poet", str(tmp_path / "poet"), "--base", str(tmp_path / "base")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "poet", dtype=torch.float32)
    torch.testing.assert_close(alone(merged, tokens_of(9)), *expected, rtol=1e-3, atol=1e-3)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "own"

class Model(LlamaForCausalLM):
    config_class = Config
"""
FP8 = {"quant_method": "fbgemm_fp8"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["a name of its own code", "quantised", "code"])
def test_what_is_served_can_be_merged(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kimi K2, whose code is not run; FP8, which becomes dense; and code, with the flag only."""
    tiny_family("deepseek_v3" if kind.startswith("a name") else "llama").save_pretrained(tmp_path)
    base, dense = quantised.quantise(tmp_path, tmp_path, quantised.fp8_rows, FP8)
    base = base if kind == "quantised" else dense
    shutil.copy(Path(TINY, "tokenizer.json"), base)
    plain = AutoModelForCausalLM.from_pretrained(dense)
    brought = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    own: dict[str, object] = {
        "a name of its own code": {"model_type": "kimi_k2", "auto_map": brought},
        "quantised": {},
        "code": {"model_type": "own", "architectures": ["Model"], "auto_map": brought},
    }
    (base / "own.py").write_text(CODE if kind == "code" else "raise SystemExit('ran')")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | own[kind]))

    def download(name: str, folder: Path) -> Path:
        model = save_peft(plain, folder, target_modules=["o_proj"])
        expected.append(alone(model, tokens_of(9)))
        return folder

    expected: list[torch.Tensor] = []
    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(download_adapter=download)))
    command = ["adapters", "merge", "poet", str(tmp_path / "poet"), "--base", str(base)]
    if kind == "code":
        refused = CliRunner().invoke(app, command)
        assert isinstance(refused.exception, UnsupportedBase) and "--trust-remote-code" in str(refused.exception)
        command.append("--trust-remote-code")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "poet", trust_remote_code=kind == "code")
    torch.testing.assert_close(alone(merged, tokens_of(9)), expected[-1], rtol=1e-3, atol=1e-3)


def test_an_adapter_of_other_modules_is_not_merged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(name: str, folder: Path) -> Path:
        save_peft(AutoModelForCausalLM.from_pretrained(TINY), folder, target_modules=["q_proj"])
        weights = {name.replace("q_proj", "p_proj"): each for name, each in load_file(folder / FILE).items()}
        save_file(weights, folder / FILE)
        return folder

    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(download_adapter=download)))
    result = CliRunner().invoke(app, ["adapters", "merge", "poet", str(tmp_path / "poet"), "--base", "bundled"])
    assert isinstance(result.exception, UnsupportedAdapter) and "q_proj" in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("beside", [False, True])
def test_a_cartridge_is_not_merged(beside: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(name: str, folder: Path) -> Path:
        save_peft(AutoModelForCausalLM.from_pretrained(TINY), folder, target_modules=["q_proj"])
        lora, cartridge = json.loads((folder / CONFIG).read_text()), {"peft_type": "CARTRIDGE"}
        both = {"peft_type": "LORA_AND_CARTRIDGE", "lora": lora, "cartridge": cartridge}
        (folder / CONFIG).write_text(json.dumps(both if beside else cartridge))
        return folder

    monkeypatch.setattr(common, "connect", lambda *_: nullcontext(SimpleNamespace(download_adapter=download)))
    result = CliRunner().invoke(app, ["adapters", "merge", "poet", str(tmp_path / "poet"), "--base", "bundled"])
    assert isinstance(result.exception, UnsupportedAdapter)
    assert "expected LoRA, got a cartridge" in str(result.exception)
    assert not list(tmp_path.iterdir())
