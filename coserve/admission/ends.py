"""Which jobs can train the model's input embedding and head. Pure: no torch, no files."""

from __future__ import annotations

import msgspec

from coserve.core.errors import InvalidRequest
from coserve.core.training.settings import TrainingRequest
from coserve.core.types import BaseSpec, LoraSettings
from coserve.lora.files.ends import end_named
from coserve.lora.files.targets import targeted_sites

NO_SESSIONS = "a session trains the layers alone, not the embedding or the head"


def learns_ends(settings: LoraSettings, base: BaseSpec) -> bool:
    """Return whether an adapter has weights of the embedding or the head."""
    return bool(settings.trainable_token_indices or targeted_sites(settings.targets or (), base.ends))


def with_end_names(settings: LoraSettings, base: BaseSpec) -> LoraSettings:
    """Return the settings with the modules in `trainable_token_indices` named as in the base."""
    tokens = settings.trainable_token_indices
    if not tokens:
        return settings
    named = {end_named(name, base) or name: own for name, own in tokens.items()}
    return msgspec.structs.replace(settings, trainable_token_indices=named)


def check_loss(settings: LoraSettings, training: TrainingRequest, base: BaseSpec) -> None:
    """Raise `InvalidRequest` for training that an adapter of embedding or head does not support: LoRA+, and a loss of
    pairs, which weights targets only after the head's backward, so that the head would get a wrong gradient."""
    if not learns_ends(settings, base):
        return
    if training.loss is not None:
        raise InvalidRequest("expected no preference loss for an adapter of embedding or head", field="training.loss")
    if training.lora_plus_ratio is not None:
        raise InvalidRequest("expected no LoRA+ for an adapter of embedding or head", field="training.lora_plus_ratio")
