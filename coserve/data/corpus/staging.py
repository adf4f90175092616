"""Corpora before they are moved into a job's folder, and the helper-process tasks that tokenise a large file. No
torch."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


PendingCorpus = Corpus | StagedCorpus
"""A tokenised corpus not yet in a job's folder: in memory, or on disk."""


class Split(msgspec.Struct, frozen=True):
    """Pieces of a source, and its unused columns as far as its beginning shows them."""

    pieces: list[Piece]
    unused: list[str]


@dataclass(frozen=True)
class Tokenization:
    """Settings of tokenisation, as arguments of `tokenize_rows`. `max_length`: most tokens of a row."""

    max_length: int
    train_on: TrainOn | None = None
    pairs: bool = False
    one_row_per_answer: bool = False


class CorpusPart(msgspec.Struct, frozen=True):
    """A tokenised piece. `lines`: lines read, empty ones included; `unused`: columns that were not read."""

    path: str
    lines: int
    rows: int
    target_tokens: int
    rows_cut: int
    unused: list[str] = []


def split_into_pieces(context: TaskContext, source: str, rows: str, columns: dict[str, str], most: int) -> Split:
    """Helper task: split a file or folder. `rows`: path for the rows as JSON Lines, if it is CSV or a JSON array;
    `most`: bytes of rows in a gzip file. Raises as `split_source` and `as_json_lines`."""
    read = Columns(columns)
    with bounded_memory(MEMORY):
        lines = as_json_lines(Path(source), Path(rows), read, context.progress, most=most)
        return Split(split_source(lines), list(read.unused))


def tokenize_piece(
    context: TaskContext,
    piece: Piece,
    target: str,
    options: Tokenization,
    columns: dict[str, str],
    memory: int = MEMORY,
) -> CorpusPart:
    """Helper task: tokenise a piece into the file `target`, with at most `memory` bytes. Raises `CorpusError`, whose
    line counts from the piece's beginning, `StorageFull`, `StorageFailed`."""
    with bounded_memory(memory):
        read, cut = Columns(columns), 0
        reader = PieceReader(piece, columns=read)
        rows = row_arrays(
            _with_progress(reader, context.progress),
            context.tokenizer,
            options.max_length,
            options.train_on,
            pairs=options.pairs,
            one_row_per_answer=options.one_row_per_answer,
        )
        with CorpusWriter(Path(target)) as part:
            for row in rows:
                part.add(row.tokens, row.target, row.split)
                cut += row.cut
        return CorpusPart(target, reader.lines, part.rows, part.target_tokens, cut, list(read.unused))


def join_parts(context: TaskContext, parts: list[CorpusPart], target: str) -> StagedCorpus:
    """Helper task: join parts into the file `target`. Raises `StorageFull`, `StorageFailed`."""
    with CorpusWriter(Path(target)) as corpus:
        for part in parts:
            context.progress()
            corpus.append(Path(part.path), part.target_tokens)
        corpus.finish(context.progress)
    with disk_errors():
        digest = file_digest(Path(target), context.progress)
    cut = sum(part.rows_cut for part in parts)
    return StagedCorpus(target, corpus.rows, corpus.token_count, corpus.target_tokens, cut, digest)


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
