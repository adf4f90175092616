"""Sampling defaults of a base: its `generation_config.json`, as transformers' `generate` and vLLM read it."""

from __future__ import annotations

import msgspec

from coserve.core.errors import UnsupportedBase
from coserve.core.sampling import NEUTRAL, SamplingDefaults
from coserve.data.pretrained.source import base_files

GENERATION_CONFIG = "generation_config.json"


class _File(SamplingDefaults, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The settings read here; the file has others, too."""


def load_sampling_defaults(source: str) -> SamplingDefaults:
    """Return a base's defaults; what it leaves out has the API's. Raises `UnsupportedBase`, also for a value out of its
    range."""
    path = base_files(source, (GENERATION_CONFIG,)) / GENERATION_CONFIG
    if not path.is_file():  # a GGUF file has none
        return NEUTRAL
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except msgspec.DecodeError as error:
        raise UnsupportedBase(
            f"{GENERATION_CONFIG} of the base: {error} (--generation-config none ignores the file)"
        ) from error
    return NEUTRAL.fill(SamplingDefaults(**{name: getattr(found, name) for name in SamplingDefaults.__struct_fields__}))
