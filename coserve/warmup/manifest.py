"""What a cache folder is known to hold. Anything that cannot be read, or does not fit, counts as nothing."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from coserve.warmup.key import CACHES

CHECKED = ("triton", "inductor/fxgraph", "inductor/aotautograd", "gemms")
"""Folders whose files a manifest vouches for. Compilers write them once, under names made of their contents' key."""
TEMPORARY = (".lock", ".tmp", ".pid")


class Manifest(msgspec.Struct, frozen=True):
    """What was completed, and the files that were there then."""

    fields: dict[str, str]
    """What the kernels depend on (`key.key_fields`)."""
    parts: dict[str, list[str]] = {}
    """Complete parts, by shape (`key.shape_key`)."""
    files: dict[str, tuple[int, int]] = {}
    """Size and CRC-32 of each file."""


def load_manifest(folder: Path, fields: Mapping[str, str]) -> Manifest:
    """The folder's manifest; an empty one where there is none that was made under these `fields`."""
    try:
        found = msgspec.json.decode(_path(folder).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Manifest(dict(fields))
    return found if found.fields == dict(fields) else Manifest(dict(fields))


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the folder's manifest at once."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"manifest.{os.getpid()}.tmp"
    temporary.write_bytes(msgspec.json.encode(manifest))
    temporary.replace(_path(folder))


def completed(manifest: Manifest, shape: str, parts: Collection[str]) -> Manifest:
    """With these parts of a shape complete."""
    return msgspec.structs.replace(manifest, parts=manifest.parts | {shape: sorted(parts)})


def list_files(folder: Path, known: Mapping[str, tuple[int, int]] | None = None) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of each file that a manifest vouches for. Those of a `known` name and size are not read again."""
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
    """Whether every file that the manifest names has its contents. More files may be there."""
    for name, (size, checksum) in manifest.files.items():
        try:
            content = (folder / name).read_bytes()
        except OSError:
            return False
        if len(content) != size or zlib.crc32(content) != checksum:
            return False
    return True


def clear(folder: Path) -> None:
    """Removes what the compilers and we have put there, the manifest first."""
    _path(folder).unlink(missing_ok=True)
    for name in (*CACHES.values(), "gemms"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    for name in CHECKED:
        for root, folders, files in os.walk(folder / name):  # passes over what another process has removed meanwhile
            folders[:] = sorted(each for each in folders if not each.startswith("tmp."))  # Triton's unfinished entries
            yield from (Path(root, each) for each in sorted(files) if not _temporary(each))


def _temporary(name: str) -> bool:
    return name.endswith(TEMPORARY) or ".tmp." in name


def _path(folder: Path) -> Path:
    return folder / "manifest.json"
