"""Models in GGUF files: the config, and the weights dequantised one at a time, by the `gguf` package's tables of names
and definitions of quantisations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.gguf import GgufHeader, GgufTensor, read_header
from coserve.model.formats.dense import DenseTensor
from coserve.model.formats.gguf_families import LAYOUTS, REFUSED, Settings, behind, made, settings_of, stored_as

LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
_YARN = {
    "rope.scaling.yarn_attn_factor": ("attention_factor",),
    "rope.scaling.yarn_beta_fast": ("beta_fast",),
    "rope.scaling.yarn_beta_slow": ("beta_slow",),
    "rope.scaling.yarn_log_multiplier": ("mscale", "mscale_all_dim"),
    "attention.temperature_scale": ("llama_4_scaling_beta",),
}
"""Fields of transformers' YaRN settings, by the metadata key that holds their value."""
UNUSED = ("rope_freqs.weight", *LONGROPE)
"""Tensors that become settings of the config instead of parameters of the model."""


def read_config(path: Path) -> PretrainedConfig:
    """Return the config that a file's metadata describes. Raises `UnsupportedBase`."""
    settings = _settings(path)
    config: PretrainedConfig = CONFIG_MAPPING[str(settings.pop("model_type"))](**settings)
    return config


def _settings(path: Path) -> Settings:
    header = read_header(path)
    if header.architecture not in LAYOUTS:
        why = REFUSED.get(header.architecture, f"known are {', '.join(sorted(LAYOUTS))}")
        raise UnsupportedBase(
            f"{path.name}: its architecture {header.architecture!r} is not read from GGUF: {why}. Give the folder or "
            "hub name of its safetensors"
        )
    settings = settings_of(header)
    settings["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    settings["tie_word_embeddings"] = "output.weight" not in header.tensors
    ids = {role: header.number(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot", "eom")}
    ends = dict.fromkeys(id for role, id in ids.items() if role != "bos" and id is not None)
    if not isinstance(settings.get("eos_token_id"), list):
        settings["eos_token_id"] = list(ends) or None
    settings["bos_token_id"] = ids["bos"]
    settings["pad_token_id"] = header.number("tokenizer.ggml.padding_token_id")
    return settings | _rotary(header, settings)


def _rotary(header: GgufHeader, settings: Settings) -> Settings:
    """Return the rotary settings of a context that was extended.

    Llama 3.1's files store them as a tensor of divisors of the frequencies. Raises `UnsupportedBase` for settings that
    are not known.
    """
    prefix = f"{header.architecture}.rope.scaling"
    old = header.metadata.get(f"{header.architecture}.rope.scale_linear")
    factor, known = header.metadata.get(f"{prefix}.factor", old), settings.get("rope_scaling")
    kind = header.metadata.get(f"{prefix}.type", "linear" if factor else "none")
    if any(name in header.tensors for name in LONGROPE):
        return _longrope(header, prefix, settings)
    if "rope_freqs.weight" in header.tensors and "rope_parameters" not in settings:
        divisors = _dequantize(header.tensors["rope_freqs.weight"])
        theta, heads = settings.get("rope_theta", 10000.0), settings.get("head_dim") or 2 * len(divisors)
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if not torch.allclose(_llama3(divisors.max(), float(str(theta)), int(str(heads))), divisors, rtol=1e-3):
            raise UnsupportedBase("model: rotary divisors (rope_freqs) other than Llama 3.1's are not supported")
        return {"rope_scaling": scaling}
    if kind == "none" or known is not None:
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedBase(f"model: rotary scaling of type {kind!r} in GGUF is not supported")
    scaling = {"rope_type": str(kind), "factor": factor}
    original = header.number(f"{prefix}.original_context_length")
    if original is not None and kind == "yarn":
        scaling["original_max_position_embeddings"] = original
    for key, fields in _YARN.items():
        if (value := header.metadata.get(f"{header.architecture}.{key}")) is not None and kind == "yarn":
            scaling |= dict.fromkeys(fields, value)
    if header.architecture == "gpt-oss":  # llama.cpp's own defaults, without rounding of the ramp's ends
        scaling |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {"rope_scaling": scaling}


def _longrope(header: GgufHeader, prefix: str, settings: Settings) -> Settings:
    """Return the settings of Phi's factors for short and long contexts. Raises `UnsupportedBase` if some of them are
    missing."""
    original = header.number(f"{prefix}.original_context_length")
    if original is None or header.architecture != "phi3" or not all(name in header.tensors for name in LONGROPE):
        raise UnsupportedBase("model: expected both LongRoPE factors of a Phi model, and its original context")
    short, long = (_dequantize(header.tensors[name]).tolist() for name in LONGROPE)
    head = int(str(settings["hidden_size"])) // int(str(settings["num_attention_heads"]))
    scaling: Settings = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    scaling |= {"attention_factor": header.metadata.get(f"{prefix}.attn_factor")}
    scaling |= {"partial_rotary_factor": 2 * len(short) / head}
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _llama3(factor: Tensor, theta: float, heads: int) -> Tensor:
    """Return Llama 3.1's divisors of the rotary frequencies (Llama 3.1's reference code)."""
    waves = 2 * torch.pi * theta ** (torch.arange(0, heads, 2) / heads)
    smooth = (8192 / waves - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(waves < 8192 / 4, 1.0, torch.where(waves > 8192, factor, between))


@contextmanager
def open_gguf(path: Path, config: PretrainedConfig) -> Iterator[dict[str, DenseTensor]]:
    """Yield the parameters of a model in a GGUF file, by the model's names.

    Raises `UnsupportedBase` for tensors of the file that the model has no parameter for.
    """
    header = read_header(path)
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in AutoModelForCausalLM.from_config(config).state_dict().items()}
    names, found = _names(header, config, shapes), dict[str, dict[str, GgufTensor]]()
    for name, tensor in header.tensors.items():
        if name in UNUSED or behind(header, name):
            continue
        if name not in names:
            raise UnsupportedBase(f"{path.name}: {config.model_type} has no parameter for its tensor {name}")
        found.setdefault(names[name], {})[name] = tensor

    def read(name: str) -> Tensor:
        """Dequantise a parameter, which may be stored as several tensors, such as experts' gates and ups."""
        parts = [_dequantize(tensor) for _, tensor in sorted(found[name].items())]
        return made(LAYOUTS[header.architecture], name, parts, config).reshape(shapes[name])

    yield {name: DenseTensor(name, partial(read, name)) for name in found}


def _names(header: GgufHeader, config: PretrainedConfig, parameters: Iterable[str]) -> dict[str, str]:
    """Return the model's names of parameters, by llama.cpp's names."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    architecture = next((arch for arch, name in MODEL_ARCH_NAMES.items() if name == header.architecture), None)
    if architecture is None:
        raise UnsupportedBase(f"model: the gguf package knows no architecture {header.architecture!r}; a newer one may")
    known = get_tensor_name_map(architecture, config.num_hidden_layers)
    found: dict[str, str] = {}
    for name in parameters:
        suffix = next((one for one in (".weight", ".bias") if name.endswith(one)), "")
        stem = name.removesuffix(suffix)
        # Some converters took the decoder's names, without the model's prefix or with another.
        spelt = (stem, stem.removeprefix("model."), stem.removeprefix("transformer."), f"backbone.{stem[6:]}")
        own = next((one for one in map(known.get_name, spelt) if one is not None), None)
        if theirs := stored_as(name):
            found |= dict.fromkeys(theirs, name)
        elif own is not None:
            found[own + suffix] = name
    return found


def _dequantize(tensor: GgufTensor) -> Tensor:
    """Return a tensor of a file in float32."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.kind)
    numbers, size = GGML_QUANT_SIZES[kind]
    rows = (*tensor.shape[:-1], tensor.shape[-1] // numbers * size)
    data = np.memmap(tensor.path, np.uint8, "r", tensor.start, rows)
    try:
        return torch.from_numpy(np.array(dequantize(data, kind), np.float32))
    except NotImplementedError as error:
        raise UnsupportedBase(f"{tensor.path.name}: the gguf package cannot dequantise {kind.name}") from error
