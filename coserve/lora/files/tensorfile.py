"""Reads safetensors files that may be hostile: every length is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from coserve.core.errors import CorruptAdapter, UnsafeAdapter, UnsupportedAdapter
from coserve.state.durable import disk_errors
from coserve.state.failpoints import failpoint

MAX_HEADER = 4 << 20
"""Most bytes of a safetensors header."""
MAX_CONFIG = 1 << 20
"""Most bytes of an `adapter_config.json`."""
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element, by safetensors' name of the dtype: those that adapters may have."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class TensorEntry:
    """One tensor; its data are bytes `[start, end)` of the file. `dtype`: a key of `ITEM_BYTES`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def open_regular(folder: Path, name: str) -> int:
    """Open `folder/name` and return its file descriptor.

    Raises `UnsafeAdapter` for links, pipes, devices and unreadable files, `CorruptAdapter` if there is no such file,
    and `StorageError` if the machine cannot open it now.
    """
    try:
        with disk_errors():
            failpoint("adapter.open")
            fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CorruptAdapter(f"expected a file {name}, found none") from error
    except OSError as error:
        raise UnsafeAdapter(f"{name}: expected a regular file that can be read") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafeAdapter(f"{name}: expected a regular file")
    return fd


def digest_file(folder: Path, name: str) -> str:
    """SHA-256 of a file, hex. Raises as `open_regular`."""
    with disk_errors(), os.fdopen(open_regular(folder, name), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(found: str, registered: str, name: str) -> None:
    """Raise `CorruptAdapter` unless the file's digest is the registered one."""
    if found != registered:
        raise CorruptAdapter(f"{name}: the file is not the one that was registered: its SHA-256 differs")


def read_json(folder: Path, name: str) -> dict[str, object]:
    """Read a JSON object of at most `MAX_CONFIG` bytes, without repeated keys, NaN or Infinity. Raises as
    `parse_object` and `open_regular`."""
    fd = open_regular(folder, name)
    with disk_errors(), os.fdopen(fd, "rb") as file:
        data = file.read(MAX_CONFIG + 1)
    if len(data) > MAX_CONFIG:
        raise CorruptAdapter(f"{name}: expected at most {MAX_CONFIG} bytes")
    return parse_object(data, name)


def parse_object(data: bytes, name: str) -> dict[str, object]:
    """Parse a JSON object. Raises `CorruptAdapter` for anything else."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    def refuse(constant: str) -> object:
        raise ValueError(f"{constant} is not allowed")

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
        if b"\\u" in data:
            json.dumps(
                value, ensure_ascii=False
            ).encode()  # raises for a lone surrogate, which no file or answer can hold
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CorruptAdapter(f"{name}: not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise CorruptAdapter(f"{name}: expected a JSON object, got {type(value).__name__}")
    return value


class TensorFile:
    """An open safetensors file with a valid header: known types, no holes, no overlaps, nothing past the end."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises `CorruptAdapter`, `UnsupportedAdapter` for a dtype that adapters don't have, and as `open_regular`."""
        self._fd = open_regular(folder, name)
        try:
            with disk_errors():
                self.bytes = os.fstat(self._fd).st_size
                self.metadata, self.entries = self._header(name)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def read(self, entry: TensorEntry) -> bytearray:
        """Read a tensor's bytes. Raises as `read_into`."""
        data = bytearray(entry.end - entry.start)
        self.read_into(entry, memoryview(data))
        return data

    def read_into(self, entry: TensorEntry, view: memoryview) -> None:
        """Read a tensor's bytes into `view`, which has the same size. Raises `CorruptAdapter` if the file became
        shorter, and `StorageError`."""
        at = entry.start
        while view:
            with disk_errors():
                got = os.preadv(self._fd, [view], at)
            if got == 0:
                raise CorruptAdapter("the weights' file became shorter while it was read")
            view, at = view[got:], at + got

    def chunks(self, entry: TensorEntry) -> Iterator[bytes]:
        """Yield a tensor's bytes, at most 1 MiB at once."""
        for at in range(entry.start, entry.end, _CHUNK):
            size = min(_CHUNK, entry.end - at)
            with disk_errors():
                failpoint("adapter.read")
                chunk = os.pread(self._fd, size, at)
            if len(chunk) < size:
                raise CorruptAdapter("the weights' file became shorter while it was read")
            yield chunk

    def sha256(self, progress: Callable[[], None] = lambda: None) -> str:
        """SHA-256 of the whole file, hex. `progress` is called for each MiB."""
        digest, at, chunk = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK))
        with disk_errors():
            if sys.platform == "linux":
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_WILLNEED)  # a disk reads ahead of the hash
            while got := os.preadv(self._fd, [chunk], at):
                digest.update(chunk[:got])
                progress()
                at += got
        return digest.hexdigest()

    def _header(self, name: str) -> tuple[dict[str, str], dict[str, TensorEntry]]:
        prefix = os.pread(self._fd, 8, 0)
        if len(prefix) < 8:
            raise CorruptAdapter(f"{name}: too short for a safetensors file ({self.bytes} bytes)")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER:
            raise CorruptAdapter(f"{name}: expected a header of at most {MAX_HEADER} bytes, got {length}")
        if length < 2 or 8 + length > self.bytes:
            raise CorruptAdapter(f"{name}: truncated: a header of {length} bytes in a file of {self.bytes}")
        header = parse_object(os.pread(self._fd, length, 8), f"{name}: header")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise CorruptAdapter(f"{name}: expected text metadata")
        entries = {key: self._entry(key, value, 8 + length) for key, value in header.items()}
        at = 8 + length
        for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != at:
                raise CorruptAdapter(f"{name}: tensor {key[:120]!r} leaves a hole or overlaps another")
            at = entry.end
        if at != self.bytes:
            raise CorruptAdapter(f"{name}: expected {at} bytes, got {self.bytes}")
        return metadata, entries

    def _entry(self, key: str, value: object, data_start: int) -> TensorEntry:
        where = f"tensor {key[:120]!r}"
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise CorruptAdapter(f"{where}: expected dtype, shape and data_offsets")
        dtype, shape = value["dtype"], _naturals(value["shape"])
        offsets = _naturals(value["data_offsets"])
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise UnsupportedAdapter(f"{where}: expected one of {', '.join(ITEM_BYTES)}, got {str(dtype)[:40]!r}")
        if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise CorruptAdapter(f"{where}: expected a shape and two ascending offsets")
        if len(shape) > 4 or math.prod(shape) * ITEM_BYTES[dtype] != offsets[1] - offsets[0]:
            raise CorruptAdapter(f"{where}: its shape and type don't fill its {offsets[1] - offsets[0]} bytes")
        return TensorEntry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _naturals(value: object) -> list[int] | None:
    """Return `value` if it is a list of integers from 0 to 2^48, else None."""
    good = isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)
    return value if good else None  # type: ignore[return-value]  # just checked
