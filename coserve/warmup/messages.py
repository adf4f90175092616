"""JSON lines that the processes of a warm-up exchange."""

from __future__ import annotations

from typing import Literal

import msgspec

FailureKind = Literal["memory", "unsupported", "error"]
"""Why a part failed: the GPU's memory is full; this base cannot be compiled; any other error, maybe a corrupt cache."""


class WarmUpTask(msgspec.Struct, frozen=True):
    """What a warm-up's process gets on its standard input."""

    config: str
    """The settings, from `config_to_json`."""
    folder: str
    """The cache folder."""
    fields: dict[str, str]
    """`key.key_fields` of this machine."""
    shape: str
    """`key.shape_key` of the settings."""
    workers: int
    """Maximum number of worker processes."""


class DoPart(msgspec.Struct, frozen=True):
    """Tells a worker to run a part."""

    name: str


class PartReport(msgspec.Struct, frozen=True):
    """A worker's progress in its part. The part ends with `done == total`, or with a `failure`."""

    done: int
    total: int
    failure: FailureKind | None = None
    reason: str = ""


class Progress(msgspec.Struct, frozen=True):
    """Progress of a warm-up, in units of `parts.Part.weight`; for the engine and the command line."""

    done: int
    total: int
    complete: list[str]
    """Parts whose kernels are on disk."""
    notes: list[str] = []
    """Failures, and what makes the warm-up slower than it could be, for the operator."""
    failed: list[str] = []
    """Parts whose kernels will not be on disk."""
    waiting: bool = False
    """Another daemon's warm-up holds the cache folder. No further line comes until it has ended."""
    ended: bool = False
