"""Reads what a base is loaded from: a folder's or a hub model's config, how its weights are quantised, and generation
settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from coserve.core.errors import UnsupportedBase
from coserve.core.names import ADAPTER_CONFIG
from coserve.data.pretrained.gguf import is_gguf
from coserve.data.pretrained.source import CODE
from coserve.model.formats.gguf import read_config as gguf_config
from coserve.model.formats.interface import Format, Settings
from coserve.model.formats.quantised import awq, compressed_tensors, fp8_blocks, fp8_rows, gptq, mxfp4
from coserve.model.settings import SAME_AS, drop_settings, has_class, refuse_settings

FORMATS: dict[str, Callable[[Settings], Format]] = {
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": fp8_rows,
    "fp8": fp8_blocks,
    "gptq": gptq,
    "mxfp4": mxfp4,
}
_KEYS = ("quantization_config", "compression_config")

log = logging.getLogger(__name__)


def read_config(
    path: str, name: str, revision: str, *, trust_remote_code: bool
) -> tuple[PretrainedConfig, Format | None]:
    """Return the config of a folder, a GGUF file or a hub name, at a revision, as that of a dense model, and how its
    weights are quantised; None: as they are, or in GGUF."""
    if is_gguf(path):
        return gguf_config(Path(path)), None
    local = Path(path).exists()
    settings, _ = PretrainedConfig.get_config_dict(path, revision=revision, local_files_only=local)
    trust_remote_code = trust_remote_code and not has_class(settings)  # old code of a model does not run any more
    unknown = refuse_settings(name, settings, trust_remote_code)
    if CODE in unknown:
        log.warning("%s: its files bring Python code, which is not run: transformers has its class", name)
    if unknown - {CODE}:
        keys = ", ".join(sorted(unknown - {CODE}))
        log.warning("%s: config.json sets %s, which transformers does not know: left out", name, keys)
    if local and (Path(path) / ADAPTER_CONFIG).exists():
        raise UnsupportedBase(f"{name}: the folder holds an adapter; expected a base model")
    family = str(settings.get("model_type"))
    renamed = {"model_type": SAME_AS[family]} if family in SAME_AS and has_class(settings) else {}
    config: PretrainedConfig = AutoConfig.from_pretrained(
        path, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local, **renamed
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
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, StrictDataclassError) as error:
        raise UnsupportedBase(f"{name}: transformers cannot load it: {error}") from error


def eos_of(model: PreTrainedModel) -> set[int]:
    """Return the end-of-sequence ids in the generation settings and the config."""
    found: set[int] = set()
    for holder in (model.generation_config, model.config.get_text_config()):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            found |= set(ids) if isinstance(ids, list | tuple) else {ids}
    return found


def take_format(config: PretrainedConfig, name: str) -> Format | None:
    """Remove the quantisation from a base's config, so that it describes a dense model, and return the format of the
    weights; None if they are dense. Raises `UnsupportedBase` for quantisations that are not read."""
    found: Format | None = None
    for holder in (config.get_text_config(), config):
        for key in _KEYS:
            settings = vars(holder).pop(key, None)
            if settings is not None:
                try:
                    found = _format_of(settings)
                except UnsupportedBase as error:
                    raise UnsupportedBase(f"{name}: {error}") from error
    return found


def _format_of(settings: object) -> Format:
    """Return the format that a `quantization_config` describes."""
    method = str(settings.get("quant_method")) if isinstance(settings, Mapping) else type(settings).__name__
    make = FORMATS.get(method.replace("_", "-") if method.startswith("compressed") else method)
    if make is None or not isinstance(settings, Mapping):
        raise UnsupportedBase(
            f"its weights are quantised by {method!r}; coserve reads {', '.join(sorted(FORMATS))}. Take the "
            "model's unquantised checkpoint, or write one with transformers (model.dequantize(), save_pretrained)"
        )
    return make(settings)
