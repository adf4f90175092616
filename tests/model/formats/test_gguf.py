"""GGUF files as bases: config, tokenizer, template and weights come from the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM, GemmaTokenizer, LlamaTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.source import check_source
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.model.base import Base
from coserve.model.formats.gguf import read_config
from coserve.model.load import load_base
from coserve.model.parallel.mesh import LoneRank
from tests.support.families import tiny_family
from tests.support.gguf_files import write_by_names, write_llama

ASSETS = Path("coserve/assets/tiny")
TEXTS = ("Hello, it's 2024 and  I'm here:\n\n don't!\t", "äöü 漢字 🙂 <|endoftext|>", " ", "def f(x):\n    return x")


def _load(path: Path, **settings: object) -> Base:
    return load_base(str(path), device="cpu", dtype="auto", **settings)  # type: ignore[arg-type]


def test_the_bundled_base_in_a_gguf_file_is_the_same_base(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.bfloat16)
    path, template = tmp_path / "tiny-base.gguf", "{{ messages[0].content }}<|endoftext|>"
    write_llama(path, model, GGMLQuantizationType.BF16, tokenizer=ASSETS / "tokenizer.json", template=template)
    check_source(str(path))
    base, bundled = _load(path), load_base("bundled", device="cpu", dtype="auto")
    assert base.spec.fingerprint == bundled.spec.fingerprint
    assert (base.spec.name, base.spec.eos_token_ids, base.spec.context) == ("tiny-base.gguf", (0, 1), 1024)
    assert base.note == "the base's weights are dequantised from GGUF at load"
    tokenizer, expected = Tokenizer.load(str(path)), Tokenizer.load("bundled")
    for text in TEXTS:
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == expected.decode(expected.encode(text))
    assert tokenizer.eos_token_ids == (0, 1)
    assert tokenizer.chat([{"role": "user", "content": "Hi"}]) == [*tokenizer.encode("Hi"), 0]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "MXFP4", "F16", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_quantised_weights_are_those_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    size = max(64, block)
    model = tiny_family("llama", hidden_size=size, intermediate_size=size + max(32, block), head_dim=size // 4)
    path = tmp_path / "model.gguf"
    written = write_llama(path, model, GGMLQuantizationType[kind])
    base = _load(path)
    part = _load(path, mesh=LoneRank(1, 2)).model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    for name, parameter in base.model.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(written[name]).reshape(parameter.shape)), name
    whole = base.model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    assert torch.equal(part, whole[len(whole) // 2 :])


def test_a_hybrid_in_a_gguf_file_is_the_same_base(tmp_path: Path) -> None:
    """LFM2, whose makers publish GGUF files: its convolutions, and its texts cut as Llama 3's, digits by threes."""
    model, path = tiny_family("lfm2"), tmp_path / "hybrid.gguf"
    config, inner = model.config, len(model.get_parameter("model.layers.0.feed_forward.w1.weight"))
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    write_by_names(
        path,
        model,
        MODEL_ARCH.LFM2,
        tokenizer=ASSETS / "tokenizer.json",
        pre="lfm2",
        feed_forward_length=inner,
        attention__head_count_kv=heads,
        attention__layer_norm_rms_epsilon=config.norm_eps,
        shortconv__l_cache=config.conv_L_cache,
    )
    found = _load(path).model
    for name, parameter in model.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name
    tokenizer, bundled = Tokenizer.load(str(path)), Tokenizer.load("bundled")
    one, two = "1234", "Don't"
    assert tokenizer.encode(one) == [*bundled.encode("123"), *bundled.encode("4")]
    assert tokenizer.decode(tokenizer.encode(two)) == two


def test_an_extended_context_keeps_its_frequencies_or_is_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters = scaling | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    model = tiny_family("llama", hidden_size=64, head_dim=32, num_attention_heads=2, rope_parameters=parameters)
    plain = tiny_family(
        "llama", hidden_size=64, head_dim=32, num_attention_heads=2, rope_parameters={"rope_theta": 500000.0}
    )
    found = model.model.rotary_emb.inv_freq
    divisors = plain.model.rotary_emb.inv_freq / found
    path = tmp_path / "model.gguf"
    write_llama(path, model, GGMLQuantizationType.F32, rope_freqs=divisors)
    torch.testing.assert_close(_load(path).model.model.rotary_emb.inv_freq, found)
    write_llama(path, model, GGMLQuantizationType.F32, rope_freqs=divisors + 1)
    with pytest.raises(UnsupportedBase, match="rope_freqs"):
        _load(path)
    keys = ("rope.scaling.factor", "rope.scale_linear")  # the newer and the older: linear, if no type is named
    for given in ({"type": "linear", "factor": 4.0}, *({"further": {key: 4.0}} for key in keys)):
        write_llama(path, plain, GGMLQuantizationType.F32, **given)  # type: ignore[arg-type]
        torch.testing.assert_close(_load(path).model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq / 4)


@pytest.mark.parametrize("family", ["smollm3", "granite"])
def test_families_that_llama_cpp_writes_as_llama(family: str, tmp_path: Path) -> None:
    own = {"attention_multiplier": 0.25, "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
    keys = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    scales = own if family == "granite" else {}
    model = tiny_family(family, **scales, attention_bias=True)
    path = tmp_path / "model.gguf"
    further = dict(zip(keys, scales.values(), strict=False))
    write_llama(path, model, GGMLQuantizationType.F32, architecture=family, further=further)
    found = _load(path).model
    for name, parameter in model.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name
    for name in (*scales, "rope_parameters", "num_key_value_heads", "no_rope_layers", "tie_word_embeddings"):
        assert getattr(found.config, name, None) == getattr(model.config, name, None), name
    assert found.config.rms_norm_eps == pytest.approx(model.config.rms_norm_eps)


def test_gpt_oss_in_a_gguf_file_is_the_same_base(tmp_path: Path) -> None:
    """Names, order and scaling as llama.cpp's converter writes them; transformers reads others."""
    model, path = tiny_family("gpt_oss", max_position_embeddings=256), tmp_path / "oss.gguf"
    config, tensors = model.config, dict[str, torch.Tensor]()
    for layer in range(config.num_hidden_layers):
        theirs, part = f"model.layers.{layer}", f"blk.{layer}"
        both = model.get_parameter(f"{theirs}.mlp.experts.gate_up_proj").detach().transpose(1, 2)
        bias = model.get_parameter(f"{theirs}.mlp.experts.gate_up_proj_bias").detach()
        down = model.get_parameter(f"{theirs}.mlp.experts.down_proj").detach().transpose(1, 2)
        tensors |= {f"{part}.ffn_up_exps.weight": both[:, 1::2], f"{part}.ffn_gate_exps.weight": both[:, ::2]}
        tensors |= {f"{part}.ffn_up_exps.bias": bias[:, 1::2], f"{part}.ffn_gate_exps.bias": bias[:, ::2]}
        tensors |= {f"{part}.ffn_down_exps.weight": down}
        tensors |= {
            f"{part}.ffn_down_exps.bias": model.get_parameter(f"{theirs}.mlp.experts.down_proj_bias").detach(),
            f"{part}.attn_sinks.weight": model.get_parameter(f"{theirs}.self_attn.sinks").detach(),
        }
    write_by_names(
        path,
        model,
        MODEL_ARCH.GPT_OSS,
        tensors=tensors,
        feed_forward_length=config.intermediate_size,
        expert_count=config.num_local_experts,
        expert_used_count=config.num_experts_per_tok,
        attention__head_count_kv=config.num_key_value_heads,
        attention__key_length=config.head_dim,
        attention__layer_norm_rms_epsilon=config.rms_norm_eps,
        attention__sliding_window=config.sliding_window,
        rope__scaling__type="yarn",
        rope__scaling__factor=32.0,
        rope__scaling__original_context_length=4096,
    )
    base = _load(path)
    for name, parameter in model.named_parameters():
        assert torch.equal(base.model.get_parameter(name), parameter), name
    assert torch.equal(base.model.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert base.model.config.sliding_window == config.sliding_window


@pytest.mark.parametrize(
    ("architecture", "layers", "width", "heads", "given", "name", "expected"),
    [
        ("gemma2", 46, 4608, 32, {"attention.key_length": 128}, "query_pre_attn_scalar", 144),  # of 27B
        ("gemma3", 62, 5376, 32, {"attention.key_length": 128}, "query_pre_attn_scalar", 168),
        ("gemma3", 34, 2560, 8, {"attention.key_length": 256}, "query_pre_attn_scalar", 256),
        ("gemma2", 3, 64, 2, {"attention.key_length": 64}, "query_pre_attn_scalar", 64),
        ("qwen3moe", 94, 4096, 64, {"expert_feed_forward_length": 1536}, "moe_intermediate_size", 1536),
    ],
)
def test_settings_that_transformers_leaves_out(
    architecture: str,
    layers: int,
    width: int,
    heads: int,
    given: dict[str, int],
    name: str,
    expected: int,
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_embedding_length(width)
    writer.add_head_count(heads)
    for key, value in given.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((8, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert getattr(read_config(path), name) == expected


def test_an_architecture_without_a_table_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, tiny_family("llama", hidden_size=64), GGMLQuantizationType.F32, architecture="bitnet")
    with pytest.raises(
        UnsupportedBase, match=r"model.gguf: .*'bitnet' is not read from GGUF: known are .* Give the folder or hub"
    ):
        _load(path)


def test_longrope_in_a_gguf_file_is_served_up_to_the_original_context(tmp_path: Path) -> None:
    """Phi 3.5 and Phi 4 mini, whose heads are turned in part. With the window that files of Phi 3 name."""
    short, long = [1.0, 1.5, 2.0], [4.0, 6.0, 8.0]
    rotary = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    model = tiny_family(
        "phi3",
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters=rotary | {"partial_rotary_factor": 0.75},
        sliding_window=32,
    )
    config, path = model.config, tmp_path / "phi.gguf"
    given = {
        "feed_forward_length": config.intermediate_size,
        "attention__head_count_kv": config.num_key_value_heads,
        "attention__layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention__sliding_window": 32,
        "rope__dimension_count": 6,
    }
    scaling = {"rope__scaling__original_context_length": 64, "rope__scaling__attn_factor": 1.1547}
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    write_by_names(path, model, MODEL_ARCH.PHI3, tensors=factors, **given, **scaling)
    base = _load(path)
    assert base.spec.context == 64 and "longrope" in base.spec.context_note
    assert base.model.config.sliding_window == 32
    found, expected = base.model.model.rotary_emb, model.model.rotary_emb
    assert torch.equal(found.inv_freq, expected.inv_freq)
    assert found.attention_scaling == pytest.approx(expected.attention_scaling, rel=1e-4)
    for name, parameter in model.named_parameters():
        assert torch.equal(base.model.get_parameter(name), parameter), name
    write_by_names(path, model, MODEL_ARCH.PHI3, tensors=factors, **given)
    with pytest.raises(UnsupportedBase, match="LongRoPE"):
        _load(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(range(90)))
    with pytest.raises(UnsupportedBase, match=r"model.gguf: expected a GGUF file of version 2 or 3"):
        check_source(str(path))
    write_llama(path, tiny_family("llama", hidden_size=64), GGMLQuantizationType.F32)
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(UnsupportedBase, match="damaged"):
        check_source(str(path))


def test_a_vocabulary_of_pieces_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """SentencePiece's, of Llama 2 and Gemma: pieces with scores, and bytes for all other characters."""
    made = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "llo", "hello", "▁hello", "▁w", "or", "▁wor", "ld"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *made]
    types = [2, 3, 3, *[6] * 256, *[1] * len(made)]
    scores = [0.0] * 259 + [-float(len(made) - i) for i in range(len(made))]
    path, writer = tmp_path / "model.gguf", GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = LlamaTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer = Tokenizer.load(str(path))
    piece = tokens.index("▁")
    assert tokenizer.encode("  hello") == [1, piece, piece, tokens.index("▁hello")]  # transformers 5.24 has one less
    for text in ("hello world", "hello  hold", "wörld"):
        ids = tokenizer.encode(text)
        assert ids == [1, *expected.encode(text, add_special_tokens=False)]
        assert tokenizer.decode(ids) == text


def _written(path: Path, pre: str, tokens: dict[str, int], merges: list[str]) -> Tokenizer:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer.load(str(path))


def test_texts_are_cut_as_the_family_cuts_them(tmp_path: Path) -> None:
    """Qwen3.5 keeps marks in words; Seed-OSS keeps line ends out of punctuation, digits are apart."""
    letters = sorted(bytes_to_unicode().values())
    marked, ends = "".join(bytes_to_unicode()[byte] for byte in "x\u0301y".encode()), "!\u010a"
    merges = [f"{marked[:end]} {marked[end]}" for end in range(1, len(marked))] + [" ".join(ends), "1 2"]
    tokens = {token: id for id, token in enumerate([*letters, *(merge.replace(" ", "") for merge in merges)])}
    expected = Qwen3_5Tokenizer(vocab=tokens, merges=[tuple(merge.split(" ")) for merge in merges])
    qwen = _written(tmp_path / "qwen.gguf", "qwen35", tokens, merges)
    for text in ("x\u0301y x\u0301y!\n12", "don't  e\u0301\u0302"):
        assert qwen.encode(text) == expected.encode(text)
    assert qwen.encode("x\u0301y!\n12") == [tokens[one] for one in (marked, ends, "1", "2")]
    found = {pre: _written(tmp_path / "m.gguf", pre, tokens, merges).encode("!\n12") for pre in ("seed-coder", "glm4")}
    assert found["seed-coder"] == [tokens[one] for one in ("!", "\u010a", "1", "2")]
    assert found["glm4"] == [tokens[one] for one in (ends, "12")]


def test_gemma_4_has_pieces_with_a_list_of_merges(tmp_path: Path) -> None:
    made = ["\u2581", "a", "b", "c", "ab", "bc", "abc", "\u2581a"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *made]
    merges = [("b", "c"), ("a", "b"), ("a", "bc"), ("\u2581", "a")]
    path, writer = tmp_path / "model.gguf", GGUFWriter(tmp_path / "model.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_types([3, 3, 3, 2, *[6] * 256, *[1] * len(made)])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = GemmaTokenizer(vocab={token: id for id, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer.load(str(path))
    for text in ("abc ab a", "  a\n\u00e4"):
        assert tokenizer.encode(text) == [2, *expected.encode(text, add_special_tokens=False)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
