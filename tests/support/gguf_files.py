"""Writes GGUF files of models as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quant_shape_to_byte_shape, quantize
from gguf.tensor_mapping import get_tensor_name_map
from torch import Tensor
from transformers import PreTrainedModel

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_llama(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType,
    *,
    tokenizer: Path | None = None,
    template: str | None = None,
    rope_freqs: Tensor | None = None,
    architecture: str = "llama",
    further: Mapping[str, float] | None = None,
    **metadata: str | float,
) -> dict[str, np.ndarray]:
    """Write the model, a Llama or one that llama.cpp writes so, with matrices in `kind`, and the tokenizer of a
    byte-level tokenizer.json. Return what was written, by the model's names and dequantised. `further`: settings of
    the architecture."""
    from gguf.quants import dequantize

    config, writer = model.config, GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, number in (further or {}).items():
        writer.add_float32(f"{architecture}.{key}", number)
    for key, value in metadata.items():
        name = f"llama.rope.scaling.{key}"
        writer.add_string(name, value) if isinstance(value, str) else writer.add_float32(name, value)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer, template)
    written = {}
    for name, parameter in model.named_parameters():
        own = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
        own = own.replace("lm_head", "output").replace("model.layers", "blk")
        for theirs, short in NAMES.items():
            own = own.replace(f".{theirs}.", f".{short}.")
        tensor = parameter.detach().float().numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        stored = next((permute(tensor, count) for part, count in heads.items() if part in own), tensor)
        as_kind = kind if tensor.ndim == 2 else GGMLQuantizationType.F32
        data = _quantized(np.ascontiguousarray(stored), as_kind)
        writer.add_tensor(own, data, raw_dtype=as_kind)
        back = dequantize(data, as_kind)
        written[name] = next((unpermute(back, count) for part, count in heads.items() if part in own), back)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def write_by_names(
    path: Path,
    model: PreTrainedModel,
    architecture: MODEL_ARCH,
    *,
    tokenizer: Path | None = None,
    pre: str = "gpt-2",
    tensors: Mapping[str, Sequence[float] | Tensor] | None = None,
    change: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda _name, _tensor: {},
    **metadata: float | str | list[int] | list[bool],
) -> None:
    """Write a model in float32 under the names that the `gguf` package has for its modules' weights and biases, and
    what `tensors` and `metadata` have, dots of keys written as `__`. `change`: makes what is stored of a parameter, by
    its name in the model; nothing: the parameter itself."""
    config, name = model.config, MODEL_ARCH_NAMES[architecture]
    writer, known = GGUFWriter(path, name), get_tensor_name_map(architecture, config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    rotary = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4}
    writer.add_rope_freq_base(rotary.get("full_attention", rotary)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for key, value in ({"block_count": config.num_hidden_layers} | metadata).items():
        full = f"{name}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(full, value)  # type: ignore[operator]
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer, None, pre)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    for own, parameter in (dict(model.named_parameters()) | buffers).items():
        stem, _, suffix = own.rpartition(".")
        tensor = parameter.detach().float()
        if stored := change(own, tensor):
            for theirs, part in stored.items():
                writer.add_tensor(theirs, part.contiguous().numpy())
            continue
        if suffix not in ("weight", "bias"):
            continue
        theirs = known.get_name(stem) or known.get_name(stem.removeprefix("model."))
        writer.add_tensor(f"{theirs}.{suffix}", (tensor[:, 0] if tensor.dim() == 3 else tensor).contiguous().numpy())
    for own, numbers in (tensors or {}).items():
        writer.add_tensor(own, torch.as_tensor(numbers, dtype=torch.float32).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantized(tensor: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Of kinds that the `gguf` package reads but cannot write, such as Q4_K: blocks of any codes, and small scales."""
    try:
        return quantize(tensor, kind)
    except NotImplementedError:
        shape = quant_shape_to_byte_shape(tensor.shape, kind)
        return np.random.default_rng(tensor.size).integers(0, 40, shape, np.uint8)


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rotary rows: pairs beside each other."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(writer: GGUFWriter, tokenizer: Path, template: str | None, pre: str = "gpt-2") -> None:
    written = json.loads(tokenizer.read_text())
    ids = written["model"]["vocab"] | {token["content"]: token["id"] for token in written["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    special = {token["content"] for token in written["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = written["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    if template is not None:
        writer.add_chat_template(template)
