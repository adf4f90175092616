"""The manifest of a cache folder: which parts are complete, and the checksums of their files.

A manifest that cannot be read, or was written on another machine or by other versions, counts as empty.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from coserve.warmup.key import CACHES, GEMM_FOLDER

CHECKED = ("triton", "inductor/fxgraph", "inductor/aotautograd", GEMM_FOLDER)
"""Folders whose files a manifest lists. Compilers write each file once, under a name derived from its inputs."""
TEMPORARY = (".lock", ".tmp", ".pid")
"""Suffixes of the compilers' own temporary files."""


class Manifest(msgspec.Struct, frozen=True):
    """Which parts are complete, which have failed, and the files that were there then."""

    fields: dict[str, str]
    """`key.key_fields` of the machine that compiled."""
    parts: dict[str, list[str]] = {}
    """Complete parts, by shape (`key.shape_key`)."""
    files: dict[str, tuple[int, int]] = {}
    """Size and CRC-32 of each file."""
    failed: dict[str, list[str]] = {}
    """Parts that failed for an unknown reason with a new cache, by shape: the cache is not the reason."""
    checked_by: str = ""
    """`CacheLock.token` of the warm-up that has compared the files with their checksums, or made them."""


def load_manifest(folder: Path, fields: Mapping[str, str]) -> Manifest:
    """The folder's manifest; an empty one if there is none with these `fields`."""
    try:
        found = msgspec.json.decode(_path(folder).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Manifest(dict(fields))
    return found if found.fields == dict(fields) else Manifest(dict(fields))


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the folder's manifest atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"manifest.{os.getpid()}.tmp"
    temporary.write_bytes(msgspec.json.encode(manifest))
    temporary.replace(_path(folder))


def with_parts(manifest: Manifest, shape: str, complete: Collection[str], failed: Collection[str] = ()) -> Manifest:
    """The manifest with these parts of a shape; see `Manifest` for the failed ones."""
    return msgspec.structs.replace(
        manifest,
        parts=_with_names(manifest.parts, shape, complete),
        failed=_with_names(manifest.failed, shape, failed),
    )


def without_files(manifest: Manifest) -> Manifest:
    """The manifest of the same folder once it is cleared."""
    return msgspec.structs.replace(manifest, parts={}, files={})


def list_files(folder: Path, known: Mapping[str, tuple[int, int]] | None = None) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of each file that a manifest lists. A file with a `known` name and size is not read again."""
    found = {}
    for path in _files(folder):
        name = str(path.relative_to(folder))
        before = (known or {}).get(name)
        try:
            if before is not None and path.stat().st_size == before[0]:
                found[name] = before
                continue
            content = path.read_bytes()
        except OSError:  # another process has replaced it
            continue
        found[name] = len(content), zlib.crc32(content)
    return found


def is_intact(folder: Path, manifest: Manifest) -> bool:
    """Whether every file of the manifest has its size and checksum. Further files do no harm."""
    for name, (size, checksum) in manifest.files.items():
        try:
            content = (folder / name).read_bytes()
        except OSError:
            return False
        if len(content) != size or zlib.crc32(content) != checksum:
            return False
    return True


def clear_cache(folder: Path) -> None:
    """Delete the compilers' caches and our files, the manifest first. Other files stay."""
    _path(folder).unlink(missing_ok=True)
    for name in (*CACHES.values(), GEMM_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)


def _with_names(before: Mapping[str, list[str]], shape: str, names: Collection[str]) -> dict[str, list[str]]:
    return {**before, shape: sorted(names)} if names else {key: value for key, value in before.items() if key != shape}


def _files(folder: Path) -> Iterator[Path]:
    for name in CHECKED:
        for root, folders, files in os.walk(folder / name):  # skips what another process removes meanwhile
            folders[:] = sorted(each for each in folders if not each.startswith("tmp."))  # Triton's unfinished entries
            yield from (Path(root, each) for each in sorted(files) if not _temporary(each))


def _temporary(name: str) -> bool:
    return name.endswith(TEMPORARY) or ".tmp." in name


def _path(folder: Path) -> Path:
    return folder / "manifest.json"
