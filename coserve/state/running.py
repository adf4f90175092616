"""Daemons of this user on this machine: each has a file, which it locks while it runs."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from coserve.core.types import Wire

log = logging.getLogger(__name__)


class RunningDaemon(Wire, frozen=True):
    """A daemon. `started_at`: seconds since the epoch."""

    pid: int
    url: str
    model: str
    data_dir: str
    started_at: float


def folder() -> Path:
    """Return the folder of this user's daemon files; it is empty after a boot."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "coserve" if runtime else Path(f"/tmp/coserve-{os.getuid()}")  # noqa: S108 - checked below


@contextmanager
def announced(daemon: RunningDaemon) -> Iterator[None]:
    """List the daemon inside the block. A folder that cannot be written leaves it unlisted, with a warning."""
    path = folder() / f"{daemon.pid}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path.parent)
        file = _written(path, daemon)
    except OSError as error:
        log.warning("coserve ps will not list this daemon: %s: %s", path.parent, error.strerror)
        yield
        return
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _written(path: Path, daemon: RunningDaemon) -> IO[bytes]:
    """Write the daemon's file, and return it open and locked. It has its name only then: another process takes a file
    without a lock for that of a dead daemon."""
    unnamed = path.with_suffix(".new")
    file = unnamed.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(msgspec.json.encode(daemon))
        file.flush()
        unnamed.replace(path)
    except BaseException:
        file.close()
        raise
    return file


def running() -> list[RunningDaemon]:
    """The daemons that run, oldest first. Files of those that were killed are removed."""
    found = []
    try:
        _check_owner(folder())
        paths = list(folder().glob("*.json"))
    except OSError:
        return []
    for path in paths:
        with _opened(path) as file:
            if file is None:
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                found.append(msgspec.json.decode(file.read(), type=RunningDaemon))
    return sorted(found, key=lambda daemon: daemon.started_at)


def wait_for_end(daemon: RunningDaemon) -> None:
    """Wait until the daemon's process has ended: then its lock is free."""
    with _opened(folder() / f"{daemon.pid}.json") as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_SH)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | None]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        yield file


def _check_owner(path: Path) -> None:
    """Raise `PermissionError` if another user made the folder."""
    if path.lstat().st_uid != os.getuid() or path.is_symlink():
        raise PermissionError(1, "it belongs to another user", str(path))
