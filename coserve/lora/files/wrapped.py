"""Names of a language model's modules by itself and inside multimodal wrappers: an adapter of one fits the other."""

from __future__ import annotations

from collections.abc import Container

_DECODERS = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "model.language_model.model.",
    "language_model.",
)
"""Paths of the decoder: in a text model, in a wrapper of transformers 5, and in wrappers of earlier versions."""
_OTHER_PARTS = frozenset(
    {
        *("vision_tower", "visual", "vision_model", "image_encoder", "multi_modal_projector", "mm_projector"),
        *("audio_tower", "embed_vision", "embed_audio", "connector"),
    }
)


def site_of(name: str, sites: Container[str]) -> str | None:
    """Return the base's site that a file calls `name`; None if there is none."""
    if name in sites:
        return name
    for decoder in _DECODERS:
        if name.startswith(f"{decoder}layers."):
            others = (other + name.removeprefix(decoder) for other in _DECODERS)
            return next((other for other in others if other in sites), None)
    return None


def outside_text(name: str) -> str | None:
    """Return the part of a multimodal model, other than its language model, that a module belongs to."""
    return next((part for part in name.split(".") if part in _OTHER_PARTS), None)
