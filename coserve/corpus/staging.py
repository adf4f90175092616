"""Corpora on their way into a job's folder; the helper-process task that tokenises a large file. No torch."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from coserve.corpus.rows import Row
from coserve.corpus.sources import read_rows
from coserve.corpus.tokenize import row_arrays
from coserve.corpus.writer import CorpusWriter
from coserve.errors import EmptyCorpus
from coserve.offload.protocol import TaskContext
from coserve.state.durable import move_file
from coserve.types import TrainOn

MEMORY = 4 << 30
"""Bytes of memory that a process may take while it tokenises a corpus: parquet files of a few KB can hold rows of any size."""


class PendingCorpus(Protocol):
    """A tokenised corpus not yet in a job's folder: a `Corpus` in memory, or a `StagedCorpus` on disk."""

    @property
    def rows(self) -> int: ...
    @property
    def token_count(self) -> int: ...
    @property
    def target_tokens(self) -> int: ...
    @property
    def rows_cut(self) -> int: ...

    def read_lengths(self) -> npt.NDArray[np.int64]: ...
    def save(self, path: Path) -> None: ...
    def discard(self) -> None: ...


class StagedCorpus(msgspec.Struct, frozen=True):
    """A corpus file in a temporary folder of its own. `save` moves the file, `discard` deletes it; both delete the folder."""

    path: str
    rows: int
    token_count: int
    target_tokens: int
    rows_cut: int

    def read_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row: int64 (S)."""
        with safe_open(self.path, framework="numpy") as file:
            bounds: npt.NDArray[np.int64] = file.get_tensor("bounds")
        return np.diff(bounds)

    def save(self, path: Path) -> None:
        """Durable when it returns. Raises `StorageFull`, `StorageFailed`; the staged file is deleted then, too."""
        try:
            move_file(Path(self.path), path, point="corpus")
        finally:
            self.discard()

    def discard(self) -> None:
        shutil.rmtree(Path(self.path).parent, ignore_errors=True)


class TokenizeFile(msgspec.Struct, frozen=True):
    """Tokenise the file or folder `source` into `target`; rows have at most `max_length` tokens."""

    source: str
    target: str
    max_length: int
    train_on: TrainOn | None = None
    pairs: bool = False
    memory: int = MEMORY
    """Bytes of memory that it may take."""


def tokenize_file(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Task of a helper process: `TokenizeFile` in, `StagedCorpus` out, as MessagePack. Raises `CorpusError` leaves, `StorageFull`, `StorageFailed`."""
    request = msgspec.msgpack.decode(arguments, type=TokenizeFile)
    with _bounded_memory(request.memory):
        return _tokenize_file(context, request)


def _tokenize_file(context: TaskContext, request: TokenizeFile) -> bytes:
    rows = _with_progress(read_rows(Path(request.source)), context.progress)
    cut = 0
    with CorpusWriter(Path(request.target)) as corpus:
        for row in row_arrays(rows, context.tokenizer, request.max_length, request.train_on, pairs=request.pairs):
            corpus.add(row.tokens, row.target, row.split)
            cut += row.cut
        corpus.finish()
        staged = StagedCorpus(request.target, corpus.rows, corpus.token_count, corpus.target_tokens, cut)
    return msgspec.msgpack.encode(staged)


@contextmanager
def _bounded_memory(size: int) -> Iterator[None]:
    """This process can allocate at most `size` bytes. Files that are mapped do not count. Raises `EmptyCorpus` for `MemoryError`."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(
        resource.RLIMIT_DATA, (size if before[1] == resource.RLIM_INFINITY else min(size, before[1]), before[1])
    )
    try:
        yield
    except MemoryError as error:
        raise EmptyCorpus(f"expected a corpus that is read within {size >> 20} MiB of memory", field="path") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _with_progress(rows: Iterable[Row], progress: Callable[[], None]) -> Iterator[Row]:
    """Call `progress` before each row, so that the caller knows that the process is alive."""
    for row in rows:
        progress()
        yield row
