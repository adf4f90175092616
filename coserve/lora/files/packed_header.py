"""The format of packed files: an adapter's bytes as host memory holds them, in the folder of PEFT's files.

16 bytes of magic, the header's length (8 bytes, little-endian), the header (msgpack), zeros up to a multiple of
`ALIGNMENT`, then the bytes. The header has the stamps of PEFT's files, and the digest of the bytes, which a daily scrub
compares and not each read. No torch.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from coserve.core.names import ADAPTER_FILES
from coserve.core.types import LoraSettings
from coserve.lora.files.tensorfile import open_regular

PACKED_FILE: Final = "adapter_packed.coserve"
MAGIC: Final = b"coserve packed 1"
ALIGNMENT: Final = 4096
MAX_HEADER: Final = 4 << 20


class Stamp(msgspec.Struct, frozen=True):
    """A file's size and modification time: another one means that the file was replaced or written."""

    size: int
    mtime_ns: int


class PackedSite(msgspec.Struct, frozen=True):
    """One pair, as in `LoraPair`: shapes of its matrices without padding."""

    name: str
    a: tuple[int, int]
    b: tuple[int, int]
    scaling: float
    a_blocks: int
    b_blocks: int
    experts: int


class PackedHeader(msgspec.Struct, frozen=True):
    """Describes the packed weights, and the PEFT files that they were made from."""

    sources: tuple[Stamp, ...]
    """Stamps of PEFT's files as they were read, in the order of `ADAPTER_FILES`."""
    digests: tuple[str, str]
    """SHA-256 (hex) of PEFT's files: weights, config."""
    fingerprint: str
    """The base's fingerprint."""
    dtype: str
    vector: int
    """Rows of B are padded to a multiple of this many elements."""
    settings: LoraSettings
    sites: tuple[PackedSite, ...]
    bytes: int
    sha256: str
    """SHA-256 (hex) of the bytes."""


_DECODER = msgspec.msgpack.Decoder(PackedHeader)  # created now: headers are read on several threads (`decoder_of`)


def stamps(folder: Path) -> tuple[Stamp, ...]:
    """Return the stamps of PEFT's files. Raises `OSError`."""
    found = ((folder / name).stat(follow_symlinks=False) for name in ADAPTER_FILES)
    return tuple(Stamp(each.st_size, each.st_mtime_ns) for each in found)


def encode_header(header: PackedHeader) -> bytes:
    """Return the beginning of a packed file, up to the weights: magic, length, header and padding."""
    content = msgspec.msgpack.encode(header)
    start = MAGIC + len(content).to_bytes(8, "little") + content
    return start + bytes(-len(start) % ALIGNMENT)


def read_header(file: BinaryIO) -> tuple[PackedHeader, int] | None:
    """Read the header of an open file; return it and the offset of the weights. None: this is no packed file."""
    start = file.read(len(MAGIC) + 8)
    size = int.from_bytes(start[len(MAGIC) :], "little")
    if not start.startswith(MAGIC) or size > MAX_HEADER:
        return None
    try:
        header = _DECODER.decode(file.read(size))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    end = len(start) + size
    return header, end + -end % ALIGNMENT


def is_sound(folder: Path) -> bool:
    """Whether a folder's packed file, if it has one, is whole and has the bytes that were written. Raises
    `StorageError`, `AdapterError`."""
    if not (folder / PACKED_FILE).exists():
        return True
    with os.fdopen(open_regular(folder, PACKED_FILE), "rb") as file:
        if (found := read_header(file)) is None:
            return False
        header, begins = found
        file.seek(begins)
        return hashlib.file_digest(file, "sha256").hexdigest() == header.sha256
