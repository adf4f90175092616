"""Lines of JSON between the processes of a warm-up."""

from __future__ import annotations

from typing import Literal

import msgspec

Trouble = Literal["memory", "unsupported", "error"]
"""Why a part failed: the GPU's memory is full; this base cannot be compiled; anything else, a corrupt cache perhaps."""


class Task(msgspec.Struct, frozen=True):
    """All that a warm-up needs to know."""

    config: str
    """The settings, as `config_to_json` gives them."""
    folder: str
    """Where caches are kept."""
    fields: dict[str, str]
    shape: str
    workers: int
    """Most processes that compile at once."""


class DoPart(msgspec.Struct, frozen=True):
    """To a worker."""

    name: str


class PartReport(msgspec.Struct, frozen=True):
    """From a worker: `done == total` ends the part, or `trouble` does."""

    done: int
    total: int
    trouble: Trouble | None = None
    why: str = ""


class Progress(msgspec.Struct, frozen=True):
    """How far a warm-up is, for the engine or the command line."""

    done: int
    total: int
    complete: list[str]
    """Parts whose kernels are on disk."""
    notes: list[str] = []
    """What went wrong, for an operator."""
    failed: list[str] = []
    """Parts whose kernels will not be on disk."""
    ended: bool = False
