"""Descriptions of the saved states of clients' training sessions: base, LoRA settings, owner. No torch."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from coserve.core.access.principal import DEFAULT_PROJECT, principal
from coserve.core.errors import ForbiddenPath, NotFound
from coserve.core.names import CHECKPOINT_STATE
from coserve.core.types import LoraSettings, Wire
from coserve.core.validation import decode_json
from coserve.state.durable import read_errors
from coserve.state.folder import DataFolder


class SessionState(Wire, frozen=True):
    """Content of `state.json`."""

    base: str
    base_fingerprint: str
    lora: LoraSettings
    seed: int
    step: int
    """Optimizer steps done."""
    project: str = DEFAULT_PROJECT
    saved_at: float = 0.0
    """Seconds since the epoch."""


def write_state(path: Path, state: SessionState) -> None:
    """Write `state.json`, with the time."""
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(state, saved_at=time.time())))


def read_state(folder: DataFolder, run: str, name: str) -> SessionState:
    """Read the description of a saved state. Raises `NotFound`, also for another project's, and `StorageError`."""
    state: SessionState | None
    try:
        path = folder.session_state(run, name) / CHECKPOINT_STATE
        with read_errors():
            state = decode_json(path.read_bytes(), SessionState)
    except (FileNotFoundError, NotADirectoryError, ForbiddenPath, msgspec.DecodeError):
        state = None
    if state is None or not principal().sees(state.project):
        raise NotFound(f"no saved state {name!r} of run {run!r}", field="path")
    return state


def saved_states(folder: DataFolder, run: str) -> list[tuple[str, SessionState]]:
    """Names and contents of a run's saved states that the principal may see, oldest first. Raises `StorageError`."""
    names, found = [], []
    try:
        parent = folder.session_state(run, "name").parent
        with read_errors():
            names = [entry.name for entry in parent.iterdir() if not entry.name.startswith(".")]
    except (FileNotFoundError, ForbiddenPath):
        pass
    for name in names:
        with suppress(NotFound):  # another project's, or deleted meanwhile
            found.append((name, read_state(folder, run, name)))
    return sorted(found, key=lambda one: one[1].saved_at)
