"""Checks PEFT's `adapter_config.json` against a list of allowed keys and values. No torch.

Unknown keys and unimplemented variants are refused by name unless they are switched off. PEFT itself ignores keys that
it does not know; an adapter read that way would be served wrong silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, cast

from coserve.core.errors import CorruptAdapter, UnsafeAdapter, UnsupportedAdapter
from coserve.core.limits import MAX_IMPORTED_BLOCKS
from coserve.core.names import ADAPTER_CONFIG, PICKLE_SUFFIXES
from coserve.lora.files.targets import MAX_ALPHA
from coserve.lora.files.tensorfile import read_json
from coserve.state.durable import disk_errors
from coserve.state.failpoints import failpoint

_MAX_FILES = 1000
_MAX_BD_NAMES = 1024


_TRAINER_STATE = re.compile(r"(optimizer|scheduler|scaler|rng_state(_\d+)?|training_args)\.(pt|pth|bin)")
"""Files that transformers' Trainer writes next to the adapter in a `checkpoint-500`. They are never opened."""


BOTH: Final = "LORA_AND_CARTRIDGE"
"""The `peft_type` of LoRA beside a cartridge. PEFT has none for both and loads neither half of such a folder."""


class Configs(NamedTuple):
    """PEFT's configs of an adapter's parts; None: it has no such part."""

    lora: dict[str, object] | None
    cartridge: dict[str, object] | None

    def lora_alone(self) -> dict[str, object]:
        """Return the config of an adapter without a KV prefix. Raises `UnsupportedAdapter` for others."""
        if self.lora is None or self.cartridge is not None:
            beside = "" if self.lora is None else " beside it"
            raise UnsupportedAdapter(f"expected LoRA, got a cartridge{beside}", field="peft_type")
        return self.lora


def read_configs(folder: Path) -> Configs:
    """Return the content of a folder's `adapter_config.json`, after checking that the folder holds no unsafe file and
    each key is allowed. Raises `UnsafeAdapter`, `CorruptAdapter`, `UnsupportedAdapter`, and `StorageError`."""
    names = _safe_names(folder)
    checkpoints = [name for name in names if re.fullmatch(r"checkpoint-\d+", name)]
    if checkpoints and ADAPTER_CONFIG not in names:
        last = max(checkpoints, key=lambda name: int(name.removeprefix("checkpoint-")))
        raise CorruptAdapter(f"expected a file {ADAPTER_CONFIG}, found checkpoints: import one of them, such as {last}")
    config = read_json(folder, ADAPTER_CONFIG)
    match config.get("peft_type"):
        case "LORA":
            return Configs(_checked(config, _ALLOWED), None)
        case "CARTRIDGE":
            return Configs(None, _checked(config, _OF_CARTRIDGES))
        case "LORA_AND_CARTRIDGE":
            lora, cartridge = config.get("lora"), config.get("cartridge")
            if not isinstance(lora, dict) or not isinstance(cartridge, dict) or len(config) != 3:
                raise CorruptAdapter(f"expected the configs lora and cartridge beside peft_type {BOTH}")
            return Configs(_checked(lora, _ALLOWED), _checked(cartridge, _OF_CARTRIDGES))
        case got:
            raise UnsupportedAdapter(f"expected peft_type LORA or CARTRIDGE, got {_show(got)}", field="peft_type")


def _checked(config: dict[str, object], keys: Mapping[str, Callable[[object], bool]]) -> dict[str, object]:
    for key, value in config.items():
        allowed = keys.get(key, _off)
        if not allowed(value):
            what = _REASONS.get(key, "coserve does not implement it")
            raise UnsupportedAdapter(f"{ADAPTER_CONFIG}: {key[:80]} = {_show(value)}: {what}", field=key[:80])
    return config


def _safe_names(folder: Path) -> list[str]:
    """Return the names in the folder. Raises `UnsafeAdapter` if there are files that unpickling would execute, other
    than the state of a trainer. None of them is ever opened."""
    try:
        with disk_errors():
            failpoint("adapter.open")
            names = sorted(os.listdir(folder))  # noqa: PTH208  # names only: no stat, no open
    except OSError as error:
        raise CorruptAdapter("expected a folder that can be read") from error
    if len(names) > _MAX_FILES:
        raise UnsafeAdapter(f"expected at most {_MAX_FILES} files, got {len(names)}")
    for name in names:
        if name.lower().endswith(PICKLE_SUFFIXES) and not _TRAINER_STATE.fullmatch(name):
            raise UnsafeAdapter(f"{name[:80]!r}: only safetensors weights are accepted; remove this file")
    return names


def _show(value: object) -> str:
    return repr(value)[:80]


def _off(value: object) -> bool:
    return value is None or value is False or value in ({}, [])


def _any(value: object) -> bool:
    return True


def _is(*values: object) -> Callable[[object], bool]:
    return lambda value: any(type(value) is type(one) and value == one for one in values)


def _alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_ALPHA


def _names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) and name for name in value)


def _modules(value: object) -> bool:
    """Accept names, a regular expression, or null (PEFT's own choice)."""
    return value is None or (isinstance(value, str) and bool(value)) or _names(value)


def _tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def _layers(value: object) -> bool:
    return value is None or type(value) is int or (isinstance(value, list) and all(type(i) is int for i in value))


def _table(good: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or (isinstance(value, dict) and all(good(item) for item in value.values()))


def _block_diagonal(value: object) -> bool:
    if value is None:
        return True
    known = {"match_strict", "nblocks", "target_modules_bd_a", "target_modules_bd_b"}
    return (
        isinstance(value, dict)
        and set(value) <= known
        and type(blocks := value.get("nblocks", 1)) is int
        and 1 <= blocks <= MAX_IMPORTED_BLOCKS
        and isinstance(value.get("match_strict", True), bool)
        and all(_few_names(value.get(key)) for key in ("target_modules_bd_a", "target_modules_bd_b"))
    )


def _few_names(value: object) -> bool:
    """Accept null or a short list of names. Each is searched for in every module's path, so the list is bounded."""
    return not value or (_names(value) and len(cast("list[str]", value)) <= _MAX_BD_NAMES)


def _rank(value: object) -> bool:
    return type(value) is int and 1 <= value < 1 << 24


_ALLOWED: dict[str, Callable[[object], bool]] = {
    # Keys that change what an adapter computes.
    "peft_type": _is("LORA"),
    "task_type": _is("CAUSAL_LM", None),
    "r": _rank,
    "lora_alpha": _alpha,
    "use_rslora": _is(True, False, None),
    "use_dora": _is(True, False, None),
    "rank_pattern": _table(_rank),
    "alpha_pattern": _table(_alpha),
    "target_modules": lambda value: value == [] or _modules(value),
    "target_parameters": lambda value: not value or _names(value),
    "exclude_modules": lambda value: value in ([], "") or _modules(value),
    "layers_to_transform": _layers,
    "use_bdlora": _block_diagonal,
    "bias": _is("none"),
    "init_lora_weights": _is(True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    "lora_dropout": lambda value: isinstance(value, int | float) and 0 <= value <= 1,
    "modules_to_save": lambda value: not value or _names(value),
    "trainable_token_indices": lambda value: not value or _tokens(value) or _table(_tokens)(value),
    # Keys that do not change it.
    "fan_in_fan_out": _is(True, False, None),
    "layers_pattern": lambda value: value in ([], "") or _modules(value),
    "ensure_weight_tying": _is(True, False, None),
    "velora_config": _any,
    "eva_config": _any,
    "base_model_name_or_path": _any,
    "revision": _any,
    "auto_mapping": _any,
    "inference_mode": _any,
    "peft_version": _any,
    "megatron_core": _any,
    "qalora_group_size": _any,
    "runtime_config": _any,
    "lora_dtype": _any,
    "lorap_lr_ratio": _any,
    "lorap_emb_lr": _any,
}
_SIZES = "num_virtual_tokens", "token_dim", "num_layers", "num_attention_heads"
_OF_CARTRIDGES: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(_SIZES, _rank),
    **dict.fromkeys(("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version"), _any),
    "peft_type": _is("CARTRIDGE"),
    "task_type": _is("CAUSAL_LM", None),
    "num_transformer_submodules": _is(1, None),
    "num_frozen_tokens": lambda value: type(value) is int and value >= 0,
}
_CHANGES_BASE = (
    "it changes the base's own weights; convert the adapter to plain LoRA with PEFT: save_pretrained(..., "
    "path_initial_model_for_weight_conversion=FOLDER), the adapter as saved before its training"
)
_RANKS = "expected a whole number of at least 1"
_REASONS = {
    **dict.fromkeys(("r", *_SIZES), _RANKS),
    "num_frozen_tokens": "expected a whole number of at least 0",
    "rank_pattern": f"names with ranks: {_RANKS}",
    "use_rslora": "expected true, false or null",
    "lora_alpha": f"expected a number of at most {MAX_ALPHA:.0e}",
    "alpha_pattern": f"expected numbers of at most {MAX_ALPHA:.0e}",
    "target_modules": "expected module names or a regular expression",
    "exclude_modules": "expected module names or a regular expression",
    "layers_pattern": "expected names of lists of layers",
    "task_type": "expected CAUSAL_LM",
    "use_dora": "expected true, false or null",
    "lora_bias": "LoRA with a bias is not implemented",
    "bias": "adapters that train biases are not implemented",
    "alora_invocation_tokens": "activated LoRA is not implemented, and no plain LoRA computes the same: train the "
    "adapter again without alora_invocation_tokens",
    "modules_to_save": "expected a list of names",
    "trainable_token_indices": "expected a list of token ids, or such lists by module",
    "target_parameters": "expected a list of names",
    "use_qalora": "QALoRA is not implemented",
    "layer_replication": "layer replication is not implemented",
    "use_bdlora": f"expected nblocks of 1 to {MAX_IMPORTED_BLOCKS}, match_strict, and target_modules_bd_a and "
    f"target_modules_bd_b as lists of at most {_MAX_BD_NAMES} names",
    "init_lora_weights": _CHANGES_BASE,
    "loftq_config": "it changes the base's own weights, and cannot be converted: train the adapter without LoftQ",
    "corda_config": _CHANGES_BASE,
    "lora_ga_config": _CHANGES_BASE,
    "auto_map": "an adapter cannot bring code",
}
