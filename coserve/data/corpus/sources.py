"""Reads rows from a file or folder: JSONL, parquet, or a folder saved by `datasets`. No torch.

A source is split into pieces, which several processes can read at the same time. Parquet files and folders are read a
few rows at a time, with pyarrow, which is optional.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from coserve.core.errors import InvalidRequest, MalformedRow, UnreadableCorpus
from coserve.core.validation import decode_json
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.jsonl import parse_lines, source_errors
from coserve.data.corpus.limits import LIMITS, CorpusLimits
from coserve.data.corpus.rows import Row, parse_row
from coserve.state.durable import disk_errors

if TYPE_CHECKING:
    from pyarrow import RecordBatch

STATE = "state.json"
"""File in a folder of `Dataset.save_to_disk` that names its data files."""
PARQUET = b"PAR1"
"""First bytes of a parquet file."""
BATCH_ROWS = 64


@dataclass(frozen=True)
class PieceSizes:
    """Sizes of the pieces that a source is split into."""

    bytes: int = 512 << 10
    """Bytes of a JSONL piece: a few seconds of work."""
    most_bytes: int = 8 << 20
    """Largest bytes of a JSONL piece: pieces grow up to this where a file would have more than `many`."""
    many: int = 1024
    rows: int = 4096
    """Rows of a piece of a table (parquet or Arrow)."""


PIECES = PieceSizes()


class Piece(msgspec.Struct, frozen=True):
    """Part of a file. JSONL: the lines that begin within the bytes `start` to `stop` (exclusive). Table: the rows
    `start` to `stop`."""

    path: str
    format: Literal["jsonl", "parquet", "arrow"]
    start: int
    stop: int


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct, rename={"data_files": "_data_files"}):
    data_files: list[_DataFile]


def is_jsonl(source: Path) -> bool:
    """Return whether `source` is read as JSONL: it is a file, and not parquet. Raises `UnreadableCorpus` if it cannot
    be opened."""
    if source.is_dir():
        return False
    with source_errors(), disk_errors(), source.open("rb") as file:
        return file.read(len(PARQUET)) != PARQUET


def is_dataset(folder: Path) -> bool:
    return (folder / STATE).is_file()


def split_source(source: Path, sizes: PieceSizes = PIECES) -> list[Piece]:
    """Split a JSONL file, a parquet file or a folder of `Dataset.save_to_disk` into pieces, in the order of their rows.

    Raises `UnreadableCorpus`, `MalformedRow` for two columns of the same name, and `InvalidRequest` if pyarrow is
    missing.
    """
    if is_jsonl(source):
        size = source.stat().st_size
        step = min(max(sizes.bytes, size // sizes.many), sizes.most_bytes)
        return [Piece(str(source), "jsonl", start, min(start + step, size)) for start in range(0, size, step)]
    if find_spec("pyarrow") is None:
        kind = "a folder of datasets" if source.is_dir() else "a parquet file"
        raise InvalidRequest(
            f"{kind} needs pyarrow, which is not installed: pip install 'coserve[datasets]'", field="path"
        )
    with _arrow_errors(), source_errors(), disk_errors():
        if not source.is_dir():
            return _split_table(source, "parquet", _parquet_length(source), sizes.rows)
        return [
            piece
            for path in _data_files(source)
            for piece in _split_table(path, "arrow", _stream_length(path), sizes.rows)
        ]


def _split_table(path: Path, format: Literal["parquet", "arrow"], rows: int, each: int) -> list[Piece]:
    LIMITS.check_line(min(rows, LIMITS.rows + 1))  # a damaged file may claim any number of rows
    return [Piece(str(path), format, start, min(start + each, rows)) for start in range(0, rows, each)]


class PieceReader:
    """Iterates over a piece's rows. Lines count from 1 at its beginning.

    Fields that are null count as absent, since Arrow columns have a value in every row. Raises what `parse_lines`
    raises.
    """

    def __init__(self, piece: Piece, limits: CorpusLimits = LIMITS, columns: Columns | None = None) -> None:
        self._piece, self._limits, self._columns = piece, limits, columns or Columns()
        self.lines = 0
        """Lines read so far, empty ones included."""

    def __iter__(self) -> Iterator[Row]:
        piece = self._piece
        if piece.format == "jsonl":
            rows = parse_lines(Path(piece.path), self._limits, piece.start, piece.stop, self._columns)
        else:
            found = enumerate(table_rows(piece, self._limits), start=1)
            rows = (parse_row(row, line, self._columns) for line, (row, _) in found)
        for row in rows:
            self.lines += 1
            if row is not None:
                yield row


def table_rows(piece: Piece, limits: CorpusLimits = LIMITS) -> Iterator[tuple[object, bytes]]:
    """Yield each row of a table's piece, and the row as JSON. Raises `MalformedRow`, whose lines count from 1 at the
    piece's beginning, and `UnreadableCorpus`."""
    for line, found in enumerate(_arrow_rows(piece), start=1):
        try:
            encoded = msgspec.json.encode(found)
        except (TypeError, ValueError) as error:
            raise MalformedRow("expected texts, numbers, lists and objects", line=line) from error
        if len(encoded) > limits.row_bytes:
            raise MalformedRow(f"expected at most {limits.row_bytes} bytes a row", line=line)
        yield found, encoded


def _arrow_rows(piece: Piece) -> Iterator[object]:
    with _arrow_errors(), source_errors(), disk_errors():
        read = _parquet_rows if piece.format == "parquet" else _stream_rows
        yield from read(Path(piece.path), piece.start, piece.stop)


def _parquet_length(path: Path) -> int:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        refuse_twins(file.schema_arrow.names)
        rows: int = file.metadata.num_rows
        return rows


def _parquet_rows(path: Path, start: int, stop: int) -> Iterator[object]:
    """Yield the rows `start` to `stop`. Row groups before them are skipped by the file's metadata; in the first group
    read, rows before `start` are decoded."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        groups, first, skipped = [], 0, 0
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows <= start:
                skipped += rows
            elif first < stop:
                groups.append(group)
            first += rows
        batches = file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False)
        yield from _batch_rows(batches, start - skipped, stop - skipped)


def _stream_length(path: Path) -> int:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as batches:
        refuse_twins(batches.schema.names)
        return sum(batch.num_rows for batch in batches)


def _stream_rows(path: Path, start: int, stop: int) -> Iterator[object]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as batches:
        yield from _batch_rows(batches, start, stop)


def _batch_rows(batches: Iterable[RecordBatch], start: int, stop: int) -> Iterator[object]:
    """Yield rows `start` to `stop` of the concatenated batches."""
    first = 0
    for batch in batches:
        last = min(stop - first, batch.num_rows)
        for here in range(max(0, start - first), last, BATCH_ROWS):
            yield from map(_without_nulls, batch.slice(here, min(BATCH_ROWS, last - here)).to_pylist())
        first += batch.num_rows
        if first >= stop:
            return


def refuse_twins(columns: list[str]) -> None:
    """Raise `MalformedRow` if two columns have the same name: a row would get the last one's value."""
    if len(set(columns)) < len(columns):
        twin = next(name for name in columns if columns.count(name) > 1)
        raise MalformedRow(f"expected one column {twin!r:.80}, got {columns.count(twin)}", line=1)


def _data_files(folder: Path) -> list[Path]:
    """Return the folder's data files. Raises `UnreadableCorpus` if the state cannot be read, or names a path outside
    the folder or one that is not a file."""
    try:
        state = decode_json((folder / STATE).read_bytes(), _State)
    except msgspec.MsgspecError as error:
        raise UnreadableCorpus(
            f"the corpus cannot be read: {STATE} is none of Dataset.save_to_disk", field="path"
        ) from error
    paths = [(folder / file.filename).resolve() for file in state.data_files]
    if any(path.parent != folder.resolve() for path in paths):
        raise UnreadableCorpus(f"the corpus cannot be read: {STATE} names a file outside of the folder", field="path")
    if absent := [path.name for path in paths if not path.is_file()]:  # reading a pipe would block
        raise UnreadableCorpus(f"the corpus cannot be read: the folder has no file {absent[0]!r:.80}", field="path")
    return paths


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


@contextmanager
def _arrow_errors() -> Iterator[None]:
    """Raise pyarrow's errors about a source as `UnreadableCorpus`. Conversion to Python values raises plain
    `ValueError` (text that is not UTF-8) and `OverflowError` (dates)."""
    import pyarrow

    try:
        yield
    except MemoryError:  # pyarrow's own is also an ArrowException
        raise
    except (pyarrow.lib.ArrowException, ValueError, OverflowError) as error:
        raise UnreadableCorpus(f"the corpus cannot be read: {str(error)[:200]}", field="path") from error
