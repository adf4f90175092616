"""Messages between the processes of a warm-up."""

from __future__ import annotations

from typing import Literal

import msgspec

FailureKind = Literal["memory", "unsupported", "error"]
"""Why a part failed: the GPU's memory is full; this base cannot be compiled; any other error."""


class WarmUpTask(msgspec.Struct, frozen=True):
    """Description of a whole warm-up: what to compile, and where to keep it."""

    config: str
    """The settings, from `config_to_json`."""
    folder: str
    """The cache folder."""
    fields: dict[str, str]
    """`key.key_fields` of this machine."""
    shape: str
    """`key.shape_key` of the settings."""
    workers: int
    """Most processes that use the GPU at once."""


class PartReport(msgspec.Struct, frozen=True):
    """A worker's progress in a part, which ends with `done == total`, or with a `failure`."""

    done: int
    total: int
    failure: FailureKind | None = None
    reason: str = ""


class Progress(msgspec.Struct, frozen=True):
    """Progress of a warm-up, in units of `parts.Part.weight`, for the engine and the command line."""

    done: int
    total: int
    notes: list[str] = []
    """Failures, for the operator."""
    waiting: bool = False
    """Whether another process holds the cache folder."""
    ended: bool = False
    """Whether all parts are complete or have failed, and no process uses the GPU any more."""
