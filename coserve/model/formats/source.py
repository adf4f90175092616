"""Reads what a base is loaded from: a folder's or a hub model's config and generation settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from coserve.core.errors import UnsupportedBase
from coserve.core.names import ADAPTER_CONFIG
from coserve.model.formats.choose import take_format
from coserve.model.formats.interface import Format
from coserve.model.settings import drop_settings, refuse_settings

log = logging.getLogger(__name__)


def read_config(
    path: str, name: str, *, local: bool, trust_remote_code: bool
) -> tuple[PretrainedConfig, Format | None]:
    """Return the config of a folder or a hub name as that of a dense model, and how its weights are quantised."""
    settings, _ = PretrainedConfig.get_config_dict(path, local_files_only=local)
    unknown = refuse_settings(name, settings, trust_remote_code)
    if unknown:
        log.warning(
            "%s: config.json sets %s, which transformers does not know: left out", name, ", ".join(sorted(unknown))
        )
    if local and (Path(path) / ADAPTER_CONFIG).exists():
        raise UnsupportedBase(f"{name}: the folder holds an adapter; expected a base model")
    config: PretrainedConfig = AutoConfig.from_pretrained(
        path, trust_remote_code=trust_remote_code, local_files_only=local
    )
    form = take_format(config, name)
    drop_settings(config, unknown)
    return config, form


def set_generation(model: PreTrainedModel, folder: Path) -> None:
    """Take the folder's generation settings, if it has any."""
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


@contextmanager
def loadable(name: str) -> Iterator[None]:
    """Turn errors of transformers and torch while a base is read into `UnsupportedBase`."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UnsupportedBase(f"{name}: transformers cannot load it: {error}") from error


def eos_of(model: PreTrainedModel) -> set[int]:
    """Return the end-of-sequence ids in the generation settings and the config."""
    found: set[int] = set()
    for holder in (model.generation_config, model.config.get_text_config()):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            found |= set(ids) if isinstance(ids, list | tuple) else {ids}
    return found
