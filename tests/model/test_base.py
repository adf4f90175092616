"""The base: every family through the seams, packed, equals the model's own forward; what cannot work is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.bart import BartConfig
from transformers.models.bloom import BloomConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.mamba import MambaConfig

from coserve.core.errors import ConfigError, UnsupportedBase
from coserve.kernels.attention.interface import KvShape
from coserve.model.base import wrap_base
from coserve.model.formats.load import load_whole
from coserve.model.load import load_base
from coserve.model.wrappers import drop_other_parts
from tests.support.examples import sample
from tests.support.families import tiny_family
from tests.support.host_waits import copies_from_the_host
from tests.support.lora_reference import alone, packed, tokens_of
from tests.support.tiny_models import CONTEXT, FAMILIES, VOCAB, tiny_model

LENGTHS = (1, 5, 23, 2, 9)
EVIL = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


@pytest.mark.parametrize("family", sample(FAMILIES, "llama", "gpt2", "gemma2", "qwen3"))
def test_packed_sequences_equal_the_models_own_forward(family: str) -> None:
    model = tiny_model(family)
    sequences = [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [alone(model, tokens_T) for tokens_T in sequences]
    base = wrap_base(model, name="tiny")
    for got, want in zip(packed(base, sequences), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", sample(FAMILIES, "llama", "gpt2", "gemma2", "qwen3"))
def test_a_sequences_logits_have_the_same_bits_alone_and_in_any_batch(family: str) -> None:
    base = wrap_base(tiny_model(family), name="tiny")
    sequences = [tokens_of(length, seed) for seed, length in enumerate((1, 3, 17, 40, 7, 16))]
    together = packed(base, sequences)
    for got, tokens_T in zip(together, sequences, strict=True):
        assert torch.equal(got, packed(base, [tokens_T])[0])
    keep = torch.tensor([0, 3, 20, 83])
    assert torch.equal(packed(base, sequences, keep=keep)[0], torch.cat(together)[keep])
    assert packed(base, sequences, keep=keep[:0])[0].shape == (0, VOCAB)


def test_a_wider_model_keeps_its_bits_too() -> None:
    model = tiny_model(
        "llama", hidden_size=256, intermediate_size=688, vocab_size=1000, num_attention_heads=8, num_key_value_heads=4
    )
    base = wrap_base(model, name="wide")
    sequences = [tokens_of(length, seed) for seed, length in enumerate((1, 15, 100, 120, 5))]
    for got, tokens_T in zip(packed(base, sequences), sequences, strict=True):
        assert torch.equal(got, packed(base, [tokens_T])[0])


def test_the_spec_says_what_the_model_is() -> None:
    spec = wrap_base(tiny_model("gpt2"), name="tiny").spec
    assert (spec.family, spec.layers, spec.hidden, spec.vocab, spec.context) == ("gpt2", 2, 32, VOCAB, CONTEXT)
    assert (spec.dtype, spec.device, spec.eos_token_ids) == ("float32", "cpu", (2,))
    assert spec.default_targets == ("c_attn", "c_proj", "c_fc")
    fused = spec.sites["transformer.h.1.attn.c_attn"]
    assert (fused.in_features, fused.out_features, fused.layer) == (32, 96, 1)
    assert len(spec.sites) == 8
    llama = wrap_base(tiny_model("llama"), name="tiny", eos_token_ids=(5, 4))
    assert llama.spec.eos_token_ids == (4, 5)
    assert llama.spec.sites["model.layers.0.mlp.down_proj"].in_features == 48
    assert llama.kv_shapes == [KvShape(2, 8, 8)] * 2
    assert "lm_head" not in llama.spec.sites


def test_the_base_is_frozen_and_keeps_its_parameter_names() -> None:
    model = tiny_model("llama")
    names = list(model.state_dict())
    base = wrap_base(model.train(), name="tiny")
    assert list(base.model.state_dict()) == names
    assert not base.model.training
    assert not any(parameter.requires_grad for parameter in base.model.parameters())


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_wrapping_twice_leaves_one_wrapper(family: str) -> None:
    model = tiny_family(family)
    want = packed(wrap_base(model, name="tiny"), [tokens_of(9)])[0]
    assert torch.equal(packed(wrap_base(model, name="tiny"), [tokens_of(9)])[0], want)


def test_fingerprints_tell_bases_apart_but_not_dtypes() -> None:
    model = tiny_model("llama")
    fingerprint = wrap_base(model, name="a").spec.fingerprint
    assert wrap_base(tiny_model("llama"), name="b").spec.fingerprint == fingerprint
    assert wrap_base(tiny_model("llama").to(torch.bfloat16), name="a").spec.fingerprint == fingerprint
    assert wrap_base(tiny_model("llama", seed=1), name="a").spec.fingerprint != fingerprint
    rotary = {"rope_type": "default", "rope_theta": 77.0}
    assert wrap_base(tiny_model("llama", rope_parameters=rotary), name="a").spec.fingerprint != fingerprint
    edited = tiny_model("llama")
    with torch.no_grad():
        edited.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    assert wrap_base(edited, name="a").spec.fingerprint != fingerprint


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "num_local_experts": 2,
    "pad_token_id": 0,
}


def _random(config: object) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_attention_sinks_are_handed_on() -> None:
    model = _random(GptOssConfig(**SMALL, sliding_window=6, num_experts_per_tok=2)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    sequences = [tokens_of(20), tokens_of(3)]
    expected = [alone(model, tokens_T) for tokens_T in sequences]
    got = packed(wrap_base(model, name="tiny"), sequences)
    for mine, want in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)


def test_a_config_that_asks_for_the_routers_loss_serves_without_it() -> None:
    """As many that were fine-tuned with it keep. Its counts of tokens would keep steps out of CUDA graphs."""
    base = wrap_base(tiny_family("mixtral", output_router_logits=True), name="tiny")
    assert copies_from_the_host(base) == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "attention backends"),
        (MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "context"),
    ],
    ids=["bloom", "mamba"],
)
@pytest.mark.filterwarnings("ignore")
def test_families_that_cannot_work_are_refused_with_the_reason(config: object, reason: str) -> None:
    with pytest.raises(UnsupportedBase, match=reason):
        wrap_base(_random(config), name="tiny")


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import BartForConditionalGeneration

    size = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32}
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=VOCAB, encoder_attention_heads=4, decoder_attention_heads=4, **size)
    )
    with pytest.raises(UnsupportedBase, match="encoder-decoder"):
        wrap_base(model, name="tiny")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", "d_model": 32}, "^t5 is an encoder-decoder model"),
        ({"model_type": "bart", "d_model": 32}, "^bart is an encoder-decoder model"),
        ({"model_type": "whisper"}, "^whisper is an encoder-decoder model"),
        ({"model_type": "qwen2_audio"}, r"^qwen2_audio has parts for more than text \(audio\)"),
        ({"model_type": "xlm-prophetnet"}, "xlm-prophetnet"),
        ({"model_type": "dinov2"}, "^dinov2: transformers has no causal language model"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_is_refused_by_its_config_before_weights_are_read(
    tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedBase, match=reason):
        load_base(str(tmp_path), device="cpu", dtype="auto")


def test_a_model_that_is_not_what_it_seems_is_refused() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    calls = iter(range(100))
    layer.forward = lambda *args, **kwargs: tuple(
        part if part is None else part + 0.1 * next(calls) for part in forward(*args, **kwargs)
    )
    with pytest.raises(UnsupportedBase, match="model's own forward"):
        wrap_base(model, name="tiny")


def test_a_model_whose_tokens_meet_outside_attention_is_refused() -> None:
    """A short convolution that even respects the bounds of packed sequences: its state would be lost in decoding."""
    model = tiny_model("llama")

    def convolve(module: torch.nn.Module, args: tuple[torch.Tensor], kwargs: dict[str, torch.Tensor]) -> tuple:
        hidden, positions = args[0], kwargs["position_ids"]
        before = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return ((hidden + 0.3 * before * (positions > 0)[..., None], *args[1:]), kwargs)

    model.model.layers[0].register_forward_pre_hook(convolve, with_kwargs=True)
    with pytest.raises(UnsupportedBase, match="meet in attention only"):
        wrap_base(model, name="tiny")


def test_a_model_without_finite_logits_is_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(UnsupportedBase, match="not finite"):
        wrap_base(model, name="tiny")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(str(tmp_path / "tiny"))
    return tmp_path / "tiny"


def _edit(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_folder_is_loaded_in_the_type_asked_for(saved: Path) -> None:
    base = load_base(str(saved), device="cpu", dtype="auto")
    assert (base.spec.name, base.dtype, base.spec.dtype) == ("tiny", torch.float32, "float32")
    half = load_base(str(saved), device="cpu", dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert half.spec.fingerprint == base.spec.fingerprint


def test_a_multimodal_folder_is_loaded_without_its_tower(tmp_path: Path) -> None:
    model = tiny_family("mistral3")
    model.save_pretrained(str(tmp_path))
    base = load_base(str(tmp_path), device="cpu", dtype="auto")
    assert (base.spec.family, base.spec.layers) == ("mistral3", 2)
    assert "model.language_model.layers.1.mlp.down_proj" in base.spec.sites
    assert not [name for name in base.model.state_dict() if "vision" in name]
    sequences = [tokens_of(9), tokens_of(4)]
    for got, tokens_T in zip(packed(base, sequences), sequences, strict=True):
        torch.testing.assert_close(got, alone(model, tokens_T), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "part"), [("llama", "1.mlp.up_proj"), ("mistral3", "0.self_attn.k_proj")])
def test_a_folder_that_lacks_a_parameter_is_refused(family: str, part: str, tmp_path: Path) -> None:
    """transformers would draw it at random. Towers, which are dropped, may be missing."""
    tiny_family(family).save_pretrained(str(tmp_path))
    tensors = {name: one for name, one in load_file(tmp_path / "model.safetensors").items() if "vision" not in name}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    load_base(str(tmp_path), device="cpu", dtype="auto")
    (gone,) = (name for name in tensors if f"layers.{part}.weight" in name)
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedBase, match=rf"files lack 1 parameters, the first is .*layers\.{part}\.weight"):
        load_base(str(tmp_path), device="cpu", dtype="auto")
    with pytest.raises(UnsupportedBase, match="files lack"):
        load_whole(str(tmp_path), trust_remote_code=False)


def test_a_tower_that_holds_models_is_dropped_whole() -> None:
    """As PaddleOCR-VL's, whose encoder is a model inside a model."""
    model = tiny_family("llava")
    model.model.vision_tower.encoder = tiny_family("llama")
    drop_other_parts(model)
    assert model.model.vision_tower is None
    assert not [name for name in model.state_dict() if "vision" in name]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"auto_map": EVIL, "architectures": ["LlamaLikeForCausalLM"]}, "Python code"),
        ({"auto_map": EVIL, "architectures": None}, "Python code"),
        ({"auto_map": None}, "Python code"),
        ({"auto_map": EVIL, "model_type": "no-such-family"}, "Python code"),
        ({"_attn_implementation_internal": "someone/kernel"}, "_attn_implementation_internal"),
        ({"text_config": {"_attn_implementation": "someone/kernel"}}, "_attn_implementation"),
        ({"attn_implementation": "someone/kernel"}, "attn_implementation"),
        ({"_name_or_path": {"a": 1}}, "_name_or_path"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ""),
        ({"model_type": "no-such-family"}, "no-such-family"),
        ({"vocab_size": 64}, ""),
        ({"vocab_size": None}, "'vocab_size' expected int, got NoneType"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_would_run_code_or_cannot_be_read_is_refused(saved: Path, settings: dict, reason: str) -> None:
    (saved / "evil.py").write_text("raise SystemExit('ran')")
    _edit(saved, **settings)
    with pytest.raises(UnsupportedBase, match=reason):
        load_base(str(saved), device="cpu", dtype="auto")


@pytest.mark.parametrize(("family", "named"), [("phi3", "phi3"), ("mistral3", "mistral3"), ("deepseek_v3", "kimi_k2")])
@pytest.mark.filterwarnings("ignore")
def test_code_that_comes_with_a_class_of_transformers_own_is_not_run(
    family: str, named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Phi 3, DeepSeek V3, Nemotron 3 and Kimi K2 are published: transformers has had their classes since. With the
    flag neither, which these checkpoints may need for their tokenizers."""
    model = tiny_family(family)
    model.save_pretrained(str(tmp_path))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    config = json.loads((tmp_path / "config.json").read_text())
    for one in (config, config.get("text_config", config)):
        one["auto_map"] = EVIL
    _edit(tmp_path, **config | {"model_type": named, "_made_with": "4.1"})
    for load_format, trust in (("auto", False), ("dummy", False), ("auto", True)):
        base = load_base(str(tmp_path), device="cpu", dtype="auto", load_format=load_format, trust_remote_code=trust)
        assert type(base.model) is type(model)
        assert base.spec.family == family
        assert "auto_map" not in str(base.model.config.to_dict())
        assert "Python code, which is not run" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_what_a_config_from_a_gguf_file_sets_is_left_out_with_a_note(
    saved: Path, load_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    _edit(saved, _model_name_or_path="model.gguf")
    base = load_base(str(saved), device="cpu", dtype="auto", load_format=load_format)
    assert not hasattr(base.model.config, "_model_name_or_path")
    assert "config.json sets _model_name_or_path" in caplog.text


def test_dummy_weights_need_no_files_but_the_config_and_are_the_same_each_time(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    before = torch.random.get_rng_state()
    one, two = (load_base(str(saved), device="cpu", dtype="bfloat16", load_format="dummy") for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert one.dtype == torch.bfloat16
    assert one.spec.fingerprint == two.spec.fingerprint
    assert torch.isfinite(packed(one, [tokens_of(9, 0)])[0]).all()
    _edit(saved, auto_map=EVIL, architectures=["Model"])
    with pytest.raises(UnsupportedBase, match="Python code"):
        load_base(str(saved), device="cpu", dtype="auto", load_format="dummy")


def test_pickled_weights_are_never_opened(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(UnsupportedBase):
        load_base(str(saved), device="cpu", dtype="auto")


def test_an_adapters_folder_is_no_base(saved: Path) -> None:
    (saved / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedBase, match="adapter"):
        load_base(str(saved), device="cpu", dtype="auto")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedBase, match="cannot load"):
        load_base(str(tmp_path), device="cpu", dtype="auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_cuda_without_a_gpu_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match="GPU"):
        load_base(str(saved), device="cuda", dtype="auto")


def test_the_bundled_base_loads_and_keeps_its_bits() -> None:
    base = load_base("bundled", device="cpu", dtype="auto")
    assert (base.spec.name, base.spec.family, base.dtype) == ("bundled", "llama", torch.float32)
    sequences = [tokens_of(length, seed, base.spec.vocab) for seed, length in enumerate((1, 40, 6))]
    for got, tokens_T in zip(packed(base, sequences), sequences, strict=True):
        assert torch.equal(got, packed(base, [tokens_T])[0])
