"""Chooses the class of transformers for a config's language model, also for checkpoints that take images, too."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from coserve.core.errors import UnsupportedBase


class AutoClass(Protocol):
    """One of transformers' `AutoModelFor…`."""

    def from_config(self, config: PretrainedConfig, **options: object) -> PreTrainedModel: ...

    def from_pretrained(self, path: str, **options: object) -> PreTrainedModel: ...


_LANGUAGE: AutoClass = AutoModelForCausalLM
_WITH_IMAGES: AutoClass = AutoModelForImageTextToText


def whole_class(config: PretrainedConfig) -> AutoClass:
    """Return the class of a config's whole model, towers for images included, where transformers has one.

    Raises `UnsupportedBase` as `model_class` does.
    """
    return _WITH_IMAGES if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else model_class(config)


def model_class(config: PretrainedConfig) -> AutoClass:
    """Return the class that builds and loads the model of a config.

    Raises `UnsupportedBase` if transformers has no language model for it.
    """
    brings_its_own = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if brings_its_own or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return _LANGUAGE
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return _WITH_IMAGES
    family = config.model_type
    parts = sorted(name.removesuffix("_config") for name in config.sub_configs if name != "text_config")
    if parts:
        raise UnsupportedBase(
            f"{family} has parts for more than text ({', '.join(parts)}), and transformers has no class for its text "
            "and images alone"
        )
    raise UnsupportedBase(f"{family}: transformers has no causal language model of this family")


def random_model(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, seed: int, *, trust_remote_code: bool
) -> PreTrainedModel:
    """Build a config's model on the device, with the weights of its classes' own random initialisation."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return model_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def drop_other_parts(model: PreTrainedModel) -> None:
    """Remove the towers for images and audio, which text does not pass through: they would only take memory."""
    if model.config.get_text_config() is model.config:
        return
    embedding = model.get_input_embeddings()
    dropped: list[str] = []
    for path, module in list(model.named_modules()):
        if path.startswith(tuple(f"{one}." for one in dropped)):
            continue
        if isinstance(module, PreTrainedModel) and all(inner is not embedding for inner in module.modules()):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, None)
            dropped.append(path)
    if dropped and model.device.type == "cuda":
        torch.cuda.empty_cache()  # what they had is free for pages


def without_images(model: PreTrainedModel) -> None:
    """Let a model whose tokens of an image see each other (Gemma 4 Unified) make the causal mask: there are none."""
    text = model.config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        text.use_bidirectional_attention = None
