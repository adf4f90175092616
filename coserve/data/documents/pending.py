"""A document that was split into chunks and is not yet in a job's folder. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from coserve.core.errors import CheckpointUnreadable
from coserve.data.documents.reading import Chunks
from coserve.state.durable import read_errors, write_file
from coserve.state.folder import DOCUMENT

_DECODER = msgspec.msgpack.Decoder(Chunks)  # created now: chunks are read on several threads (`decoder_of`)


@dataclass(frozen=True)
class PendingDocument:
    """A document's chunks. `save` takes the path of the job's later corpus, and writes into the same folder."""

    chunks: Chunks

    def save(self, path: Path) -> None:
        """Write the chunks; durable when this returns. Raises `StorageError`."""
        write_file(path.with_name(DOCUMENT), msgspec.msgpack.encode(self.chunks), point="corpus")

    def discard(self) -> None:
        """Do nothing: the chunks are in memory only."""


def read_chunks(path: Path) -> Chunks:
    """Return the chunks in a job's file. Raises `CheckpointUnreadable`, `StorageError`."""
    try:
        with read_errors():
            return _DECODER.decode(path.read_bytes())
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointUnreadable("the job's document cannot be read") from error
