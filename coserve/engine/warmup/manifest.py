"""A cache folder's lock, so that only one warm-up uses it at a time, and its manifest: which parts are complete, and
the checksums of the files at that time.

A manifest counts as empty if it is unreadable, comes from another machine or other versions, or has damaged files.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import IO

import msgspec

from coserve.core.validation import decode_json
from coserve.engine.warmup.key import CACHES, GEMM_FOLDER

log = logging.getLogger(__name__)

AGAIN = 0.5
"""Seconds between two attempts to take the lock."""

CHECKED = ("triton", "inductor/fxgraph", "inductor/aotautograd", GEMM_FOLDER)
"""Folders whose files a manifest lists. Compilers write each file once, under a name derived from its inputs."""
TEMPORARY = (".lock", ".tmp", ".pid")
"""Suffixes of the compilers' own temporary files."""


class Manifest(msgspec.Struct, frozen=True):
    fields: dict[str, str]
    """`key.key_fields` of the machine that compiled."""
    parts: dict[str, list[str]] = {}
    """Complete parts, by shape (`key.shape_key`)."""
    files: dict[str, tuple[int, int]] = {}
    """Size and CRC-32 of each file."""


def load(folder: Path, fields: Mapping[str, str]) -> Manifest:
    """Load the folder's manifest; an empty one if there is none with these `fields`, or if a listed file has changed.
    Unlisted files are ignored."""
    try:
        found = decode_json(_path(folder).read_bytes(), Manifest)
        if found.fields == dict(fields) and all(_read(folder / name) == known for name, known in found.files.items()):
            return found
    except (OSError, msgspec.DecodeError):
        pass
    return Manifest(dict(fields))


def clear(folder: Path) -> None:
    """Delete the compilers' caches and our files, the manifest first. Other files stay."""
    _path(folder).unlink(missing_ok=True)
    for name in (*CACHES.values(), GEMM_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)


def save(folder: Path, manifest: Manifest, shape: str, complete: Collection[str]) -> None:
    """Replace the folder's manifest atomically, with these complete parts of a shape and the files present now. Raises
    `OSError`."""
    files = {str(path.relative_to(folder)): found for path in _files(folder) if (found := _read(path)) is not None}
    parts = {**manifest.parts, shape: sorted(complete)}
    temporary = folder / f"manifest.{os.getpid()}.tmp"
    temporary.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, parts=parts, files=files)))
    temporary.replace(_path(folder))


def _read(path: Path) -> tuple[int, int] | None:
    """Size and CRC-32 of a file; None if it does not exist."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return len(content), zlib.crc32(content)


def _files(folder: Path) -> Iterator[Path]:
    for name in CHECKED:
        for root, folders, files in os.walk(folder / name):  # skips what another process removes meanwhile
            folders[:] = [each for each in folders if not each.startswith("tmp.")]  # Triton's unfinished entries
            yield from (Path(root, each) for each in files if not each.endswith(TEMPORARY) and ".tmp." not in each)


def _path(folder: Path) -> Path:
    return folder / "manifest.json"


@asynccontextmanager
async def cache_lock(folder: Path, waits: Callable[[], None]) -> AsyncIterator[None]:
    """Context that holds an exclusive flock on the folder's file `lock`; the kernel frees it when the process ends.
    `waits` is called if another process holds it. On a file system without locks, everyone proceeds, with a warning in
    the log."""
    with _opened(folder) as file:
        told = False
        while file is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    waits()
                told = True
                await asyncio.sleep(AGAIN)
            except OSError as error:
                _warn(error)
                break
        yield


def _opened(folder: Path) -> IO[bytes] | nullcontext[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / "lock").open("ab")
    except OSError as error:
        _warn(error)
        return nullcontext()


def _warn(error: OSError) -> None:
    log.warning("warm-up: the cache folder cannot be locked: %s", error.strerror)
