"""Checks a base's config.json: it must not make transformers run code, and its family must be servable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from coserve.core.errors import UnsupportedBase
from coserve.data.pretrained.source import CODE

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Families that are another one under a name that only their own code knows (Kimi K2 so that servers tell it apart)."""
_PRIVATE: dict[str, tuple[type, ...]] = {
    "_name_or_path": (str,),
    "_commit_hash": (str,),
    "_attn_implementation_autoset": (bool,),
    "_sliding_window_pattern": (int,),
    "_num_labels": (int,),
}
"""Underscored settings of published models that only describe them, with their types."""
_BEHAVIOUR = frozenset(
    {
        *(key for key in (*dir(PretrainedConfig), *vars(PretrainedConfig())) if key.startswith("_")),
        *("_attn_was_changed", "_flash_attn_2_enabled", "_heterogeneity_spec", "_is_quantized"),
        *("_pre_quantization_dtype", "_remove_final_layer_norm", "_use_kernels"),
    }
)
"""Underscored settings that transformers reads, as attributes of its own or in its models."""


def refuse_settings(
    name: str, settings: dict[str, object], trust_remote_code: bool, *, needs_no_code: bool = False
) -> frozenset[str]:
    """Refuse settings, at any depth, by which transformers would run code or load kernels from the hub.

    `needs_no_code`: of settings inside those of a family that transformers has. Returns, for `drop_settings`, the
    underscored settings that transformers does not know, and `CODE` where the files bring code that is not run.
    """
    unknown = set[str]()
    needs_no_code = needs_no_code or has_class(settings)
    if CODE in settings and not trust_remote_code:
        if not (needs_no_code and isinstance(settings[CODE], dict)):
            raise UnsupportedBase(f"{name}: its files bring Python code; pass --trust-remote-code to run it")
        unknown.add(CODE)
    own, runs_code = _own_private(settings.get("model_type")), trust_remote_code and CODE in settings
    for key, value in settings.items():
        allowed = _NUMBERS if key in own else _PRIVATE.get(key, ())
        if key.startswith("_") and value is not None and not isinstance(value, allowed):
            if isinstance(value, (str, *_NUMBERS)) and not (allowed or key in _BEHAVIOUR or runs_code):
                unknown.add(key)
                continue
            raise UnsupportedBase(f"{name}: config.json sets {key!r}, which only transformers itself may set")
        if key in ("attn_implementation", "experts_implementation", "kernel_config"):
            raise UnsupportedBase(f"{name}: config.json sets {key!r}, which can load code")
        if isinstance(value, dict):
            unknown |= refuse_settings(name, value, trust_remote_code, needs_no_code=needs_no_code)
    return frozenset(unknown)


def has_class(settings: dict[str, object]) -> bool:
    """Whether transformers has the class that a config names, of its family: written with it, or taken over since."""
    family, named = settings.get("model_type"), settings.get("architectures")
    if not isinstance(family, str) or not isinstance(named, list):
        return False
    family = SAME_AS.get(family, family)
    known = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    names = {str(table[family]).replace("_", "") for table in known if family in table}  # KimiK25 became Kimi_K25
    return any(str(one).replace("_", "") in names for one in named)


def drop_settings(config: PretrainedConfig, names: Iterable[str]) -> None:
    """Remove these settings from the config and the configs nested in it."""
    parts = [part for part in vars(config).values() if isinstance(part, PretrainedConfig)]
    for holder in (config, *parts):
        for name in names:
            vars(holder).pop(name, None)


def refuse_config(config: PretrainedConfig) -> None:
    """Raise `UnsupportedBase` for architectures that the config alone rules out."""
    family, text = config.model_type, config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    if getattr(text, "index_topk", None) or any("sparse" in str(kind) for kind in kinds):
        raise UnsupportedBase(f"{family} has sparse attention, whose indexer chooses the keys of each token")
    if text.model_type in _NOT_IMPLEMENTED:
        raise UnsupportedBase(f"{family}: {_NOT_IMPLEMENTED[text.model_type]} is not implemented")
    if config.is_encoder_decoder:
        raise UnsupportedBase(f"{family} is an encoder-decoder model; coserve serves decoder-only language models")


_NOT_IMPLEMENTED = {
    "kimi_linear": "Kimi's linear attention",
    "inkling_text": "Inkling's attention, whose scores have a bias for each distance,",
}
"""Missing features that a family needs, by the family of its text, where transformers' classes would not show it
clearly."""
_NUMBERS = (bool, int, float)
"""Types of settings that cannot name code."""


def _own_private(model_type: object) -> frozenset[str]:
    """Return the underscored fields that the family's own config class declares and that transformers writes (OPT has
    one)."""
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return frozenset()
    own, common = (
        {one.name for one in fields(kind)} if is_dataclass(kind) else set()
        for kind in (CONFIG_MAPPING[model_type], PretrainedConfig)
    )
    return frozenset(key for key in own - common if key.startswith("_"))
