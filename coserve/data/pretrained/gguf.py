"""Reads the header of a GGUF file, the format of llama.cpp: settings, vocabulary, and where each tensor lies. No torch.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from coserve.core.errors import UnsupportedBase

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata values, as `struct` names them."""
_TEXT, _LIST = 8, 9
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

Value = int | float | bool | str | list["Value"]


@dataclass(frozen=True)
class GgufTensor:
    path: Path
    shape: tuple[int, ...]
    """Shape as in torch: the slowest dimension first."""
    kind: int
    """Number of its ggml type."""
    start: int
    """Its first byte in the file."""


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]
    """Tensors by llama.cpp's names."""

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def number(self, key: str) -> int | None:
        """Return an integer of the metadata; None if there is none."""
        found = self.metadata.get(key)
        return found if isinstance(found, int) else None


def is_gguf(source: str) -> bool:
    return source.endswith(SUFFIX) and Path(source).is_file()


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file, and of the other parts of a file that was split. Raises `UnsupportedBase`."""
    found = _read_one(path)
    match, parts = _PART.search(path.name), found.number("split.count") or 1
    if parts <= 1:
        return found
    if match is None or int(match[1]) != 1:
        raise UnsupportedBase(f"model: {path.name} is one of {parts} parts of a GGUF file: name the first")
    for part in range(2, parts + 1):
        other = path.with_name(f"{path.name[: match.start()]}-{part:05}-of-{match[2]}{SUFFIX}")
        if not other.is_file():
            raise UnsupportedBase(f"model: {path.name} is incomplete: {other.name} is missing")
        found.tensors.update(_read_one(other).tensors)
    return found


def _read_one(path: Path) -> GgufHeader:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data).header(path)
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise UnsupportedBase(f"model: {path.name} is damaged: its header cannot be read") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self, path: Path) -> GgufHeader:
        magic = self._data[: len(MAGIC)]
        self._at = len(MAGIC)
        version, tensors, values = self._unpack("IQQ")
        if magic != MAGIC or version not in VERSIONS:
            raise UnsupportedBase(f"model: {path.name}: expected a GGUF file of version 2 or 3")
        metadata: dict[str, Value] = {}
        for _ in range(values):
            key = self._text()
            metadata[key] = self._value(self._unpack("I")[0])
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(tensors):
            name, dimensions = self._text(), self._unpack("I")[0]
            shape = self._unpack(f"{dimensions}Q")[::-1]
            kind, offset = self._unpack("IQ")
            found.append((name, shape, kind, offset))
        alignment = metadata.get("general.alignment", 32)
        assert isinstance(alignment, int)
        begin = -(-self._at // alignment) * alignment
        places = {name: GgufTensor(path, shape, kind, begin + offset) for name, shape, kind, offset in found}
        return GgufHeader(metadata, places)

    def _unpack(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def _text(self) -> str:
        (length,) = self._unpack("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Value:
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._unpack(_NUMBERS[kind])[0]
        inner, count = self._unpack("IQ")
        if inner in _NUMBERS:
            return list(self._unpack(f"{count}{_NUMBERS[inner]}"))
        return [self._value(inner) for _ in range(count)]
