"""Corpora before they are moved into a job's folder, and the helper-process tasks that tokenise a large file. No
torch."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from coserve.core.errors import UnreadableCorpus
from coserve.core.processes import limited
from coserve.core.training.settings import TrainOn
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.conversion import as_json_lines
from coserve.data.corpus.mapped import file_digest, map_arrays
from coserve.data.corpus.rows import Row
from coserve.data.corpus.sources import Piece, PieceReader, split_source
from coserve.data.corpus.tokenize import row_arrays
from coserve.data.corpus.tokenized import Corpus
from coserve.data.corpus.writer import CorpusWriter
from coserve.data.offload.protocol import TaskContext
from coserve.state.durable import disk_errors, move_file

MEMORY = 4 << 30
"""Most bytes of memory of a process that tokenises a corpus: parquet files of a few KB can hold rows of any size."""


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
    @property
    def digest(self) -> str: ...

    def arrays(self) -> Corpus: ...
    def save(self, path: Path) -> None: ...
    def discard(self) -> None: ...


class StagedCorpus(msgspec.Struct, frozen=True):
    """A corpus file in its own temporary folder. `save` moves the file, `discard` deletes it; both delete the
    folder."""

    path: str
    rows: int
    token_count: int
    target_tokens: int
    rows_cut: int
    digest: str
    """SHA-256 of the file, hex."""
    validation_rows: int = 0
    """Number of rows at the corpus's end that are for validation."""

    def arrays(self) -> Corpus:
        """Map the file: its arrays take no memory of this process."""
        found = map_arrays(Path(self.path))
        return Corpus(found["tokens"], found["target"], found["bounds"], found.get("splits"))

    def save(self, path: Path) -> None:
        """Move the file to `path`; durable when this returns. Raises `StorageFull`, `StorageFailed`; the staged file is
        then deleted too."""
        try:
            move_file(Path(self.path), path, point="corpus")
        finally:
            self.discard()

    def discard(self) -> None:
        shutil.rmtree(Path(self.path).parent, ignore_errors=True)


class SplitSource(msgspec.Struct, frozen=True):
    """Arguments of `split_into_pieces`: a file or folder. `rows`: path for the rows as JSON Lines, if it is CSV or a
    JSON array."""

    source: str
    rows: str
    columns: dict[str, str] = {}


class Split(msgspec.Struct, frozen=True):
    """Pieces of a source, and its unused columns as far as its beginning shows them."""

    pieces: list[Piece]
    unused: list[str]


class TokenizePiece(msgspec.Struct, frozen=True):
    """Arguments of `tokenize_piece`. `max_length`: most tokens of a row; `target`: path of the tokenised piece."""

    piece: Piece
    target: str
    max_length: int
    train_on: TrainOn | None = None
    pairs: bool = False
    one_row_per_answer: bool = False
    memory: int = MEMORY
    """Most bytes of memory that the task may take."""
    columns: dict[str, str] = {}


class CorpusPart(msgspec.Struct, frozen=True):
    """A tokenised piece. `lines`: lines read, empty ones included; `unused`: columns that were not read."""

    path: str
    lines: int
    rows: int
    target_tokens: int
    rows_cut: int
    unused: list[str] = []


class JoinParts(msgspec.Struct, frozen=True):
    """Arguments of `join_parts`. `target`: path of the joined corpus."""

    parts: list[CorpusPart]
    target: str


def split_into_pieces(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Task of a helper process: `SplitSource` in, `Split` out, as MessagePack. Raises as `split_source` and
    `as_json_lines`."""
    request = msgspec.msgpack.decode(arguments, type=SplitSource)
    columns = Columns(request.columns)
    with bounded_memory(MEMORY):
        source = as_json_lines(Path(request.source), Path(request.rows), columns, context.progress)
        return msgspec.msgpack.encode(Split(split_source(source), list(columns.unused)))


def tokenize_piece(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Task of a helper process: `TokenizePiece` in, `CorpusPart` out, as MessagePack. Raises `CorpusError`,
    whose line counts from the piece's beginning, `StorageFull`, `StorageFailed`."""
    request = msgspec.msgpack.decode(arguments, type=TokenizePiece)
    with bounded_memory(request.memory):
        return msgspec.msgpack.encode(_tokenize_piece(context, request))


def _tokenize_piece(context: TaskContext, request: TokenizePiece) -> CorpusPart:
    columns = Columns(request.columns)
    piece = PieceReader(request.piece, columns=columns)
    rows = row_arrays(
        _with_progress(piece, context.progress),
        context.tokenizer,
        request.max_length,
        request.train_on,
        pairs=request.pairs,
        one_row_per_answer=request.one_row_per_answer,
    )
    cut = 0
    with CorpusWriter(Path(request.target)) as part:
        for row in rows:
            part.add(row.tokens, row.target, row.split)
            cut += row.cut
    return CorpusPart(request.target, piece.lines, part.rows, part.target_tokens, cut, list(columns.unused))


def join_parts(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Task of a helper process: `JoinParts` in, `StagedCorpus` out, as MessagePack. Raises `StorageFull`,
    `StorageFailed`."""
    request = msgspec.msgpack.decode(arguments, type=JoinParts)
    with CorpusWriter(Path(request.target)) as corpus:
        for part in request.parts:
            context.progress()
            corpus.append(Path(part.path), part.target_tokens)
        corpus.finish(context.progress)
    with disk_errors():
        digest = file_digest(Path(request.target), context.progress)
    cut = sum(part.rows_cut for part in request.parts)
    return msgspec.msgpack.encode(
        StagedCorpus(request.target, corpus.rows, corpus.token_count, corpus.target_tokens, cut, digest)
    )


@contextmanager
def bounded_memory(size: int) -> Iterator[None]:
    """Limit this process's allocations to `size` bytes inside the block; mapped files do not count. Raises
    `UnreadableCorpus` for `MemoryError`."""
    try:
        with limited(resource.RLIMIT_DATA, size):
            yield
    except MemoryError as error:
        raise UnreadableCorpus(
            f"expected a corpus that is read within {size >> 20} MiB of memory", field="path"
        ) from error


def _with_progress(rows: Iterable[Row], progress: Callable[[], None]) -> Iterator[Row]:
    """Call `progress` before each row, which tells the caller that the process is alive."""
    for row in rows:
        progress()
        yield row
