"""How llama.cpp writes families that transformers has no table of: keys of settings, names of tensors, and changes of
their numbers. Data for `gguf.py`, learnt from llama.cpp's converter (its folder `conversion`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PretrainedConfig

from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.gguf import GgufHeader

Settings = dict[str, object]
Change = Callable[[Sequence[Tensor], PretrainedConfig], Tensor]
"""Makes a parameter from the stored tensors of it, in the order of their names (so gates before ups); the shape may
lack dimensions of 1."""
Derive = Callable[[GgufHeader, Settings], Settings]
"""Returns settings that no key has, from the file and the settings that keys have."""


@dataclass(frozen=True)
class Layout:
    """How llama.cpp writes one architecture."""

    family: str
    """transformers' `model_type`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Keys of the family's settings besides `COMMON`, without the architecture; of a list the largest number counts."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """How parameters are made whose names end so, the first that fits; others: the stored tensors joined by rows."""
    derive: Derive = lambda _header, _settings: {}


COMMON = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
NAMES = {
    ".sinks": ("attn_sinks.weight",),
    ".experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_gate_up_exps.weight"),
    ".experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    ".experts.down_proj": ("ffn_down_exps.weight",),
    ".experts.down_proj_bias": ("ffn_down_exps.bias",),
}
"""Names of a layer's tensors that the `gguf` package does not know by the model's names, by the ends of those."""


def _joined(parts: Sequence[Tensor], _config: PretrainedConfig) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -2)


def _in_turns(parts: Sequence[Tensor], _config: PretrainedConfig) -> Tensor:
    """gpt-oss' experts: inputs before outputs, and gates and ups in turns."""
    turned = [part.transpose(1, 2) if part.dim() == 3 else part for part in parts]
    return turned[0].contiguous() if len(turned) == 1 else torch.stack(turned, -1).flatten(-2)


def _by_pairs(heads: str) -> Change:
    """Undo the order of rotary rows in which the two of a pair are neighbours; `heads`: the setting that counts
    them."""

    def change(parts: Sequence[Tensor], config: PretrainedConfig) -> Tensor:
        rows = parts[0].reshape(int(getattr(config, heads)), -1, 2, parts[0].shape[1])
        return rows.transpose(1, 2).flatten(0, 2)

    return change


_PAIRS: dict[str, Change] = {
    "q_proj.weight": _by_pairs("num_attention_heads"),
    "k_proj.weight": _by_pairs("num_key_value_heads"),
}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _olmo(header: GgufHeader, settings: Settings) -> Settings:
    """OLMo 3 is OLMo 2 with windows in some layers, whose rotary frequencies no extended context scales."""
    windows = header.metadata.get("olmo2.attention.sliding_window_pattern")
    if not isinstance(windows, list):
        return {}
    rotary = {"rope_type": "default", "rope_theta": settings["rope_theta"]}
    kinds = ["sliding_attention" if one else "full_attention" for one in windows]
    parameters = {kind: dict(rotary) for kind in ("sliding_attention", "full_attention")}
    window = header.metadata["olmo2.attention.sliding_window"]
    return {"model_type": "olmo3", "layer_types": kinds, "sliding_window": window, "rope_parameters": parameters}


LAYOUTS: dict[str, Layout] = {
    "smollm3": Layout("smollm3", changes=_PAIRS),
    "granite": Layout("granite", _GRANITE, _PAIRS),
    "gpt-oss": Layout(
        "gpt_oss",
        {
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "sliding_window": "attention.sliding_window",
        },
        dict.fromkeys(("_proj", "_proj_bias"), _in_turns),
    ),
    "olmo2": Layout("olmo2", derive=_olmo),
    "seed_oss": Layout("seed_oss"),
}


def settings_of(header: GgufHeader) -> Settings:
    """Return the config's settings that the file of one of `LAYOUTS` has, `model_type` among them."""
    kind, layout = header.architecture, LAYOUTS[header.architecture]
    found: Settings = {"model_type": layout.family, "num_hidden_layers": layers(header)}
    for name, key in (COMMON | dict(layout.settings)).items():
        value = header.metadata.get(f"{kind}.{key}")
        if value is not None:
            found[name] = max(map(int, map(str, value))) if isinstance(value, list) else value
    if missing := [COMMON[name] for name in ("hidden_size", "num_attention_heads") if name not in found]:
        raise UnsupportedBase(f"model: expected the setting {kind}.{missing[0]} in the file")
    hidden, heads = (int(str(found[name])) for name in ("hidden_size", "num_attention_heads"))
    head = header.number(f"{kind}.attention.key_length") or hidden // heads
    found["head_dim"] = head
    if "partial_rotary_factor" in found:
        found["partial_rotary_factor"] = int(str(found["partial_rotary_factor"])) / head
    found["attention_bias"] = any(name.endswith("attn_q.bias") for name in header.tensors)
    return found | layout.derive(header, found)


def stored_as(name: str) -> list[str]:
    """Return the file's names for a parameter of `NAMES`; none for others."""
    found = next((names for end, names in NAMES.items() if name.endswith(end)), ())
    return [f"blk.{name.split('.')[2]}.{one}" for one in found]


def made(layout: Layout, name: str, parts: Sequence[Tensor], config: PretrainedConfig) -> Tensor:
    """Make a parameter from its stored tensors, sorted by their names."""
    change = next((change for end, change in layout.changes.items() if name.endswith(end)), _joined)
    return change(parts, config)


def behind(header: GgufHeader, name: str) -> bool:
    """Whether a tensor belongs to the layers behind the model's that predict further tokens, which are not served."""
    block, _, rest = name.partition(".")
    further = header.number(f"{header.architecture}.nextn_predict_layers") or 0
    return further > 0 and block == "blk" and int(rest.partition(".")[0]) >= layers(header)


def layers(header: GgufHeader) -> int:
    """Return the number of the model's layers, without those behind them that predict further tokens."""
    kind = header.architecture
    return (header.number(f"{kind}.block_count") or 0) - (header.number(f"{kind}.nextn_predict_layers") or 0)
