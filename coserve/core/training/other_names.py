"""Reads settings of LoRA and of training under the names that PEFT's `LoraConfig` and transformers' and TRL's trainers
have for them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

SAME = {
    # PEFT
    "lora_alpha": "alpha",
    "use_rslora": "rslora",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "init_lora_weights": "init",
    # transformers' and TRL's trainers
    "batch_size": "batch_rows",
    "train_batch_size": "batch_rows",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "lr_scheduler_type": "schedule",
    "max_seq_length": "max_length",
    "save_steps": "checkpoint_steps",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "optim": "optimizer",
    "neftune_noise_alpha": "neftune_alpha",
    "loraplus_lr_ratio": "lora_plus_ratio",
}
"""Maps other libraries' names of settings to ours of the same meaning, in the same unit."""
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Factors of `batch_rows`."""
_ADAMW = ("adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision", "adamw_32bit")
OTHER_OPTIMIZERS = {
    **dict.fromkeys((*_ADAMW, "adamw_torch_npu_fused", "adamw_torch_xla"), "adamw"),
    "adamw_bnb_8bit": "adamw_8bit",
    "lion_32bit": "lion",
    "paged_adamw_32bit": "paged_adamw",
    "paged_lion_32bit": "paged_lion",
}
"""Maps transformers' values of `optim` to ours of the same meaning."""
_VALUES: dict[str, Mapping[Any, object]] = {
    "init": {True: "default"},
    "optimizer": OTHER_OPTIMIZERS,
    "schedule": {"constant_with_warmup": "constant"},
    "max_steps": {-1: None},
}
"""Other libraries' values of the same meaning, by our name of the setting, or by theirs."""
_OF_PEFT = {
    "bias": "none",
    "ensure_weight_tying": False,
    "fan_in_fan_out": False,
    "inference_mode": False,
    "lora_bias": False,
    "megatron_core": "megatron.core",
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "task_type": "CAUSAL_LM",
    "use_qalora": False,
}
"""Fields of `LoraConfig` that coserve lacks, with the values that ask for nothing."""


def with_own_names(given: Mapping[str, object], fields: Collection[str]) -> dict[str, object]:
    """Return settings with our names and values for other libraries' of the same meaning. `fields`: the names that the
    settings may have; with those of LoRA, fields of `LoraConfig` that ask for nothing are left out. Where two names set
    the same, the second keeps its own, which is refused as unknown."""
    rows, times = (given.get(name, 1) for name in _BATCH)
    sizes = _BATCH[0] in given and "batch_rows" in fields and "batch_rows" not in given
    if sizes and isinstance(rows, int) and isinstance(times, int):
        given = {"batch_rows": rows * times, **{name: value for name, value in given.items() if name not in _BATCH}}
    found = dict[str, object]()
    for name, value in given.items():
        ours = name if name in fields else SAME.get(name, name)
        if ours == "warmup_steps" and isinstance(value, float) and value < 1:
            ours = "warmup_ratio"  # as in transformers 5
        if ours in fields and ours not in found and ours not in given.keys() - {name}:
            values = _VALUES.get(name) or _VALUES.get(ours, {})
            found[ours] = values.get(value, value) if isinstance(value, str | int) else value
        elif "rslora" not in fields or not _asks_for_nothing(name, value):
            found[name] = value
    return found


def _asks_for_nothing(name: str, value: object) -> bool:
    """Return whether a field is one of `LoraConfig`, as `to_dict` has it, whose value changes nothing."""
    return value in (None, {}, []) or name == "peft_version" or (name in _OF_PEFT and value == _OF_PEFT[name])


def take_other_names(body: Any, paths: Collection[str]) -> bool:  # noqa: ANN401 - any JSON
    """Give the settings in the objects of a decoded JSON body our names, in place; return whether any had another.
    `paths`: dotted paths of all fields of the body."""
    changed = False
    for name, settings in body.items() if isinstance(body, dict) else ():
        fields = {path.removeprefix(f"{name}.") for path in paths if path.startswith(f"{name}.")}
        if fields and isinstance(settings, dict):
            body[name] = with_own_names(settings, fields)
            changed = changed or body[name] != settings
    return changed
