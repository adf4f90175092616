"""Tells from a base's config.json how its weights are quantised. Every format is served dense: dequantised at load."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transformers import PretrainedConfig

from coserve.core.errors import UnsupportedBase
from coserve.model.formats.awq import awq
from coserve.model.formats.compressed_tensors import compressed_tensors
from coserve.model.formats.fp8 import fp8_blocks, fp8_rows
from coserve.model.formats.gptq import gptq
from coserve.model.formats.interface import Format, Settings
from coserve.model.formats.mxfp4 import mxfp4

FORMATS: dict[str, Callable[[Settings], Format]] = {
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": fp8_rows,
    "fp8": fp8_blocks,
    "gptq": gptq,
    "mxfp4": mxfp4,
}
_KEYS = ("quantization_config", "compression_config")


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
