"""Names of a language model's modules by itself and inside multimodal wrappers: an adapter of one fits the other."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, KeysView, Sequence
from pathlib import Path
from typing import cast

from coserve.core.errors import InvalidRequest, UnsupportedAdapter
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX
from coserve.lora.files.tensorfile import TensorFile, read_json
from coserve.lora.files.tensorfile_writer import header_bytes

_DECODERS = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "model.language_model.model.",
    "language_model.",
    "model.text_model.",
)
"""Paths of the decoder: in a text model, a wrapper of transformers 5, wrappers of earlier versions, and Idefics3."""
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


def decoder_among(modules: Iterable[str]) -> str | None:
    """Return the decoder's path, such as `model.language_model`, of a model with modules of these names; None if it
    is at none of the known ones."""
    names = set(modules)
    return next((path.removesuffix(".") for path in _DECODERS if f"{path}layers" in names), None)


def text_targets(names: Sequence[str], sites: KeysView[str]) -> list[str] | str:
    """Return PEFT's `target_modules` for a base with these sites: the `names`, or, inside a wrapper, whose towers may
    have modules of the same names, a regular expression."""
    decoder = next((path for path in _DECODERS[1:] if any(site.startswith(f"{path}layers.") for site in sites)), None)
    return list(names) if decoder is None or sites >= set(names) else _inside(decoder, names)


def _inside(decoder: str, names: Iterable[str]) -> str:
    return rf"({re.escape(decoder)}(.*\.)?)?({'|'.join(map(re.escape, names))})"


def outside_text(name: str) -> str | None:
    """Return the part of a multimodal model, other than its language model, that a module belongs to."""
    return next((part for part in name.split(".") if part in _OTHER_PARTS), None)


def check_decoder(decoder: str) -> None:
    """Raise `InvalidRequest` unless a model may have its decoder there."""
    if f"{decoder}." not in _DECODERS:
        known = ", ".join(path.removesuffix(".") for path in _DECODERS)
        raise InvalidRequest(f"expected one of {known}, got {decoder!r}", field="decoder")


def rename_decoder(folder: Path, decoder: str) -> None:
    """Rewrite the PEFT files of an adapter for a model whose decoder has another path, such as `model.language_model`.

    Files that name no module in a decoder, of a cartridge or of LoRA of the head alone, stay as they are. Raises
    `UnsupportedAdapter` if the adapter's own decoder has none of the known paths.
    """
    new = f"{decoder}."
    with TensorFile(folder, ADAPTER_WEIGHTS) as file:
        head = f"{PEFT_PREFIX}lm_head."
        inside = [name for name in file.entries if name.startswith(PEFT_PREFIX) and not name.startswith(head)]
        if not inside:
            return
        old = _decoder_of(inside)
        start = min(entry.start for entry in file.entries.values())
        header: dict[str, object] = {"__metadata__": file.metadata} if file.metadata else {}
        for name, entry in file.entries.items():
            offsets = [entry.start - start, entry.end - start]
            own = name.removeprefix(PEFT_PREFIX)
            renamed = name if own == name else PEFT_PREFIX + _renamed(own, old, new)
            header[renamed] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        beside = folder / f".{ADAPTER_WEIGHTS}"
        with beside.open("xb") as out:
            out.write(header_bytes(header))
            for entry in sorted(file.entries.values(), key=lambda entry: entry.start):
                out.writelines(file.chunks(entry))
    beside.replace(folder / ADAPTER_WEIGHTS)
    whole = read_json(folder, ADAPTER_CONFIG)
    config = cast("dict[str, object]", whole.get("lora", whole))
    for key in ("rank_pattern", "alpha_pattern", "trainable_token_indices"):
        if isinstance(table := config.get(key), dict):
            config[key] = {_renamed(name, old, new): value for name, value in table.items()}
    if isinstance(parameters := config.get("target_parameters"), list):
        config["target_parameters"] = [_renamed(str(name), old, new) for name in parameters]
    limits = [config.pop(key, None) for key in ("layers_to_transform", "layers_pattern", "exclude_modules")]
    targets, limited = config.get("target_modules"), any(each not in (None, [], "") for each in limits)
    if isinstance(targets, list) and not limited:  # a tower has modules of the same names
        config["target_modules"] = _inside(new, [_renamed(str(name), old, new) for name in targets])
    elif targets:  # a regular expression, of the other paths, or beside limits, which PEFT refuses beside one
        modules = (name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in header if ".lora_" in name)
        linear = (module for module in modules if not module.endswith((".experts", ".base_layer")))  # PEFT's parameters
        config["target_modules"] = list(dict.fromkeys(linear))
    (folder / ADAPTER_CONFIG).write_text(json.dumps(whole, indent=2) + "\n")


def _decoder_of(names: Iterable[str]) -> str:
    for name in names:
        for decoder in _DECODERS:
            if name.startswith((f"{PEFT_PREFIX}{decoder}layers.", f"{PEFT_PREFIX}{decoder}embed_tokens.")):
                return decoder
    raise UnsupportedAdapter(f"expected modules of one of {', '.join(f'{one}layers' for one in _DECODERS)}")


def _renamed(name: str, old: str, new: str) -> str:
    """Return a module's name, or a pattern that begins with one."""
    for before, after in ((old, new), (re.escape(old), re.escape(new))):
        for anchor in ("", "^"):
            if name.startswith(anchor + before):
                return anchor + after + name.removeprefix(anchor + before)
    return name
