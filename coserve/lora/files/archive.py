"""Archives of adapters: streams PEFT files as a tar file, and extracts them from untrusted archives. No torch."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, Final, NamedTuple

from coserve.core.errors import AdapterNotFound, BodyTooLarge, CorruptAdapter, UnsafeAdapter
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS, file_name
from coserve.lora.files.tensorfile import check_digest, open_regular
from coserve.state.durable import disk_errors
from coserve.state.registry.records import AdapterRecord

MEMBERS: Final = 1000
"""Most files and folders in an archive."""
DIRECTORY_BYTES: Final = 1 << 20
"""Most bytes of a zip file's central directory, and of a tar header: Python's libraries read both into memory."""
BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    NotImplementedError,  # a kind of zip file that `zipfile` does not read
    zlib.error,
    EOFError,
    ValueError,
    struct.error,
    OSError,  # `zipfile` seeks to where a header says; errors of the disk are raised as `StorageError` first
    RecursionError,  # `tarfile` calls itself for each of the extended headers before a file
)

CHUNK: Final = 256 << 10
READS_AT_END: Final = 8
"""Most reads after the end of a tar file: of an archive that is whole, one or two."""


class AdapterArchive:
    """A tar file of an adapter that is made while it is sent.

    It holds the files open, so they stay readable if the adapter is deleted meanwhile. Close it after use.
    """

    def __init__(self, record: AdapterRecord, folder: Path) -> None:
        """Open and read the files; call it on a worker thread.

        Raises:
            AdapterNotFound: the folder is gone.
            CorruptAdapter: the files are not those that were registered.
            StorageError: the machine cannot open a file now.
        """
        if not folder.is_dir():
            raise AdapterNotFound(f"no files of adapter {record.ref}", field="id")
        self.name = f"{file_name(record.ref.id)}-{record.ref.version}"
        """The folder in it, and its file name without the suffix."""
        self._members: list[tuple[bytes, BinaryIO, int]] = []
        with ExitStack() as stack:
            for name, sha256 in ((ADAPTER_CONFIG, record.config_sha256), (ADAPTER_WEIGHTS, record.sha256)):
                file = stack.enter_context(os.fdopen(open_regular(folder, name), "rb"))
                if sha256:
                    check_digest(hashlib.file_digest(file, "sha256").hexdigest(), sha256, name)
                    file.seek(0)
                info = tarfile.TarInfo(f"{self.name}/{name}")
                info.size, info.mtime, info.mode = os.fstat(file.fileno()).st_size, int(record.created_at), 0o644
                self._members.append((info.tobuf(tarfile.GNU_FORMAT), file, info.size))
            self._open = stack.pop_all()

    @property
    def size(self) -> int:
        """Bytes of the tar file."""
        block = tarfile.BLOCKSIZE
        return sum(len(head) + size + -size % block for head, _, size in self._members) + 2 * block

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the tar file. Call it once."""
        for head, file, size in self._members:
            yield head
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk
            yield bytes(-size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)

    def close(self) -> None:
        self._open.close()


class Member(NamedTuple):
    """A file or folder in an archive."""

    name: str
    regular: bool
    """False: a link or a device."""
    content: IO[bytes] | None
    """None for a folder."""


def unpack_adapter(archive: Path, folder: Path, most: int) -> None:
    """Write the archive's `adapter_config.json` and `adapter_model.safetensors` into `folder`, under these names: no
    path of the archive is ever used. They may lie in any one folder of it; other files are skipped.

    Raises:
        BodyTooLarge: more than `most` bytes, unpacked.
        UnsafeAdapter: a link or a device.
        CorruptAdapter: not a tar file (plain or gzip) or zip file, damaged, or not the files of one adapter.
        StorageError: the machine cannot read or write a file now.
    """
    found, left = dict[str, PurePosixPath](), most
    try:
        with disk_errors(), archive.open("rb") as file:
            for number, member in enumerate(_zip(file, most) if zipfile.is_zipfile(file) else _tar(file, most)):
                path = PurePosixPath(member.name)
                if number >= MEMBERS:
                    raise CorruptAdapter(f"expected an archive of at most {MEMBERS} files")
                if not member.regular:
                    raise UnsafeAdapter(f"expected regular files in the archive, got {member.name[-80:]!r}")
                if path.name not in ADAPTER_FILES or member.content is None:
                    continue
                if path.name in found:
                    raise CorruptAdapter(f"expected the files of one adapter, got {path.name} twice")
                found[path.name] = path.parent
                with (folder / path.name).open("xb") as target:
                    left -= _copy(member.content, target, left, most)
    except BROKEN as error:
        raise CorruptAdapter(f"the archive is damaged, or is no tar or zip file: {error}") from None
    if len(found) < len(ADAPTER_FILES) or len(set(found.values())) > 1:
        got = " and ".join(str(parent / name) for name, parent in found.items())[-200:]
        raise CorruptAdapter(f"expected {' and '.join(ADAPTER_FILES)} in one folder, got {got or 'neither'}")


def _tar(file: IO[bytes], most: int) -> Iterator[Member]:
    file.seek(0)
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    stream = _Bounded(gzip.GzipFile(fileobj=file) if packed else file, most)
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            yield Member(member.name, member.isreg() or member.isdir(), content)


class _Header(tarfile.TarInfo):
    """A header of a tar file. Raises `CorruptAdapter` for a long extended header and for the map of a sparse file,
    since `tarfile` would read these into memory as a whole."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        extended = self.type not in (*tarfile.REGULAR_TYPES, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
        if self.type == tarfile.GNUTYPE_SPARSE or (extended and self.size > DIRECTORY_BYTES):
            raise _no_header()
        found: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return found

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise _no_header()


def _no_header() -> CorruptAdapter:
    return CorruptAdapter(f"expected a tar file without sparse files, its headers of at most {DIRECTORY_BYTES} bytes")


def _zip(file: IO[bytes], most: int) -> Iterator[Member]:
    _check_directory(file)
    with zipfile.ZipFile(file) as whole:
        for member in whole.infolist():
            if not member.filename:  # `is_dir` reads its last character
                raise CorruptAdapter("expected a zip file whose files have names, got one without")
            if member.is_dir():
                yield Member(member.filename, regular=True, content=None)
                continue
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise CorruptAdapter(f"expected {member.filename[-80:]!r} without a password, and stored or deflated")
            kind = stat.S_IFMT(member.external_attr >> 16)
            with whole.open(member) as content:
                yield Member(member.filename, kind in (0, stat.S_IFREG), content)


def _check_directory(file: IO[bytes]) -> None:
    """Raise `CorruptAdapter` if a zip file's central directory is large: `zipfile` reads it into memory as a whole."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - (1 << 16) - 22))
    tail = file.read()
    end = len(tail) - 22 if tail[-22:-18] == b"PK\5\6" and tail[-2:] == b"\0\0" else tail.rfind(b"PK\5\6")
    _, directory = struct.unpack_from("<HL", tail, end + 10)
    if directory > DIRECTORY_BYTES or tail[max(0, end - 20) : end].startswith(b"PK\6\7"):
        raise CorruptAdapter(f"expected a zip file of at most {MEMBERS} files, and no zip64")


class _Bounded(io.RawIOBase):
    """A stream that raises `BodyTooLarge` after `most` bytes, plus an allowance for the archive's headers, and
    `EOFError` if it is read again and again after its end: `tarfile` does so for as many bytes as a header claims."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, most: int) -> None:
        self._stream, self._most, self._left = stream, most, most + 2 * MEMBERS * tarfile.BLOCKSIZE
        self._ends = 0

    def read(self, size: int = -1) -> bytes:
        found = self._stream.read(min(size, CHUNK) if size >= 0 else CHUNK)
        self._left -= len(found)
        self._ends += not found
        if self._ends > READS_AT_END:
            raise EOFError("it ends before its last file does")
        if self._left < 0:
            raise _too_large(self._most)
        return found


def _copy(source: IO[bytes], target: IO[bytes], left: int, most: int) -> int:
    """Copy all bytes; return how many. Raises `BodyTooLarge` beyond `left` of the `most` bytes of an archive."""
    copied = 0
    while chunk := source.read(CHUNK):
        copied += len(chunk)
        if copied > left:
            raise _too_large(most)
        target.write(chunk)
    return copied


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"expected an archive of at most {most} bytes, unpacked", field="file")
