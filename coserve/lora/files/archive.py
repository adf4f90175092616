"""Streams an adapter's PEFT files as a tar file. No torch."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from coserve.core.errors import AdapterNotFound
from coserve.core.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.lora.files.tensorfile import check_digest, open_regular
from coserve.state.registry.records import AdapterRecord

CHUNK: Final = 256 << 10


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
        self.ref = record.ref
        self._members: list[tuple[bytes, BinaryIO, int]] = []
        with ExitStack() as stack:
            for name, sha256 in ((ADAPTER_CONFIG, record.config_sha256), (ADAPTER_WEIGHTS, record.sha256)):
                file = stack.enter_context(os.fdopen(open_regular(folder, name), "rb"))
                if sha256:
                    check_digest(hashlib.file_digest(file, "sha256").hexdigest(), sha256, name)
                    file.seek(0)
                info = tarfile.TarInfo(f"{record.ref.id}-{record.ref.version}/{name}")
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
