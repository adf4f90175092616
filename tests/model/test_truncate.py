"""A base cut to few layers keeps each kind of layer, and its kernels' shapes."""

from __future__ import annotations

from pathlib import Path

from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gemma3n import Gemma3nTextConfig
from transformers.models.llama import LlamaConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

from coserve.model.load import load_base
from coserve.model.truncate import layer_kinds, truncate_layers
from tests.support.model_folder import make_model_folder


def test_layers_that_are_alike_are_cut_to_two() -> None:
    config = LlamaConfig(num_hidden_layers=32, tie_word_embeddings=False)
    truncate_layers(config)
    assert config.num_hidden_layers == 2
    assert config.tie_word_embeddings


def test_each_kind_occurs_twice() -> None:
    for config in (
        Gemma2Config(num_hidden_layers=26),
        Gemma3TextConfig(num_hidden_layers=26),
        Gemma3nTextConfig(num_hidden_layers=35, num_kv_shared_layers=15),
        Qwen3MoeConfig(num_hidden_layers=24, mlp_only_layers=[1, 3, 5], decoder_sparse_step=1),
    ):
        before = layer_kinds(config)
        truncate_layers(config)
        after = layer_kinds(config)
        assert after == before[: len(after)]
        assert {kind: min(2, before.count(kind)) for kind in before} == {
            kind: min(2, after.count(kind)) for kind in after
        }
        assert len(after) < len(before)


def test_layers_that_read_others_keys_are_a_kind() -> None:
    """The others stay before them, so that each has the layer that it reads."""
    config = Gemma3nTextConfig(num_hidden_layers=35, num_kv_shared_layers=15)
    own = config.num_hidden_layers - config.num_kv_shared_layers
    truncate_layers(config)
    assert own < config.num_hidden_layers < 35
    assert config.num_hidden_layers - config.num_kv_shared_layers == own


def test_a_base_of_few_layers_needs_no_weights(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    settings = (folder / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 40')
    (folder / "config.json").write_text(settings)
    base = load_base(str(folder), device="cpu", dtype="float32", few_layers=True)
    assert base.spec.layers == len(base.layers) == 2
