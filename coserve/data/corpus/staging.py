"""Corpora before they are moved into a job's folder, and the helper-process tasks that tokenise a large file. No
torch."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from coserve.core.cancellation import unchecked
from coserve.core.errors import UnreadableCorpus
from coserve.core.processes import limited
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.conversion import as_json_lines
from coserve.data.corpus.rows import Row
from coserve.data.corpus.sources import Piece, PieceReader, split_source
from coserve.data.corpus.tokenize import Tokenization, row_arrays
from coserve.data.corpus.tokenized import Corpus, file_digest, map_arrays
from coserve.data.offload.protocol import TaskContext
from coserve.state.durable import disk_errors, move_file
from coserve.state.failpoints import failpoint

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
        rows = row_arrays(_with_progress(reader, context.progress), context.tokenizer, options)
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


HEADER = 512
"""Bytes reserved at the beginning of the file for the header, which contains the sizes."""
BUFFER = 1 << 20
PARTS = ("", ".target", ".lengths", ".splits")
"""Suffixes of the files of an unfinished corpus: tokens, targets, tokens of each row, tokens of each pair's first
sequence."""
ITEMS = BUFFER // 8
"""Numbers of `.lengths` and `.splits` that are converted at once."""


class CorpusWriter:
    """Context that writes a new file for `Corpus.load`, row by row: memory does not grow with the corpus. Tokens are
    written in place; the other arrays go to separate files until `finish` joins them. Without `finish`, the files are a
    piece of a corpus, which `append` reads.

    Every method raises `StorageFull` and `StorageFailed`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = self.token_count = self.target_tokens = self._pairs = 0
        with contextlib.ExitStack() as opened, disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._tokens, self._target, self._lengths, self._splits = (
                opened.enter_context(file.open("x+b", buffering=BUFFER)) for file in _files(path)
            )
            self._tokens.write(bytes(HEADER))
            self._files = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with disk_errors():
            self._files.close()

    def add(self, tokens: npt.NDArray[np.int32], target: npt.NDArray[np.uint8], split: int | None = None) -> None:
        """Add a row: its tokens (n), and its targets (n) as in `Corpus`. `split`: tokens of a pair's first sequence.
        All rows are pairs, or none."""
        self.rows += 1
        self._pairs += split is not None
        assert self._pairs in (0, self.rows), "expected pairs only, or none"
        self.token_count += len(tokens)
        self.target_tokens += int(np.count_nonzero(target))
        with disk_errors():
            self._tokens.write(tokens.tobytes())
            self._target.write(target.tobytes())
            self._lengths.write(np.int64(len(tokens)).tobytes())
            if split is not None:
                self._splits.write(np.int64(split).tobytes())

    def append(self, part: Path, target_tokens: int) -> None:
        """Append all rows of a piece, and delete its files."""
        with disk_errors():
            for source, file in zip(
                _files(part), (self._tokens, self._target, self._lengths, self._splits), strict=True
            ):
                with source.open("rb") as content:
                    content.seek(HEADER if file is self._tokens else 0)
                    shutil.copyfileobj(content, file, BUFFER)
                source.unlink()
            self.rows = self._lengths.tell() // 8
            self._pairs = self._splits.tell() // 8
            self.token_count = self._target.tell()
        self.target_tokens += target_tokens
        assert self._pairs in (0, self.rows), "expected pairs only, or none"

    def finish(self, progress: Callable[[], None] = unchecked) -> None:
        """Complete the file. It is durable when this returns. `progress` is called between writes."""
        header: dict[str, object] = {}
        end = 0
        for name, dtype, count, size in (
            ("tokens", "I32", self.token_count, 4),
            ("target", "U8", self.token_count, 1),
            ("bounds", "I64", self.rows + 1, 8),
            *([("splits", "I64", self.rows, 8)] if self._pairs else []),
        ):
            header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [end, end + size * count]}
            end += size * count
        text = json.dumps(header, separators=(",", ":")).encode().ljust(HEADER - 8)
        with disk_errors():
            failpoint("corpus.temp_write")
            self._target.seek(0)
            while content := self._target.read(BUFFER):
                progress()
                self._tokens.write(content)
            self._tokens.write(np.int64(0).tobytes())
            for ends, _ in self._ends():
                self._tokens.write(ends.tobytes())
            if self._pairs:
                self._splits.seek(0)
                for ends, lengths in self._ends():
                    splits = np.frombuffer(self._splits.read(8 * len(ends)), np.int64)
                    self._tokens.write((ends - lengths + splits).tobytes())
            self._tokens.seek(0)
            self._tokens.write(len(text).to_bytes(8, "little") + text)
            self._tokens.flush()
            failpoint("corpus.before_file_fsync")
            os.fsync(self._tokens.fileno())
            failpoint("corpus.after_file_fsync")

    def _ends(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield, for `ITEMS` rows at a time: each row's end among all tokens, and its number of tokens."""
        self._lengths.seek(0)
        end = 0
        while content := self._lengths.read(8 * ITEMS):
            lengths = np.frombuffer(content, np.int64)
            ends = end + np.cumsum(lengths)
            end = int(ends[-1])
            yield ends, lengths


def _files(path: Path) -> Iterator[Path]:
    return (path.with_name(path.name + part) for part in PARTS)
