"""Converts CSV files, JSON arrays and what is compressed with gzip to JSON Lines, which several processes can read in
pieces. No torch.

All are converted in bounded memory. Rows keep their numbers: a CSV record stays on the line where it began (lines
without a record are empty), and array elements are numbered.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, cast

import msgspec

from coserve.core.errors import MalformedRow, UnreadableCorpus
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.json_array import array_elements
from coserve.data.corpus.jsonl import GZIP, source_errors
from coserve.data.corpus.limits import LIMITS, CorpusLimits
from coserve.data.corpus.rows import choose_columns
from coserve.data.corpus.sources import PieceSizes, is_jsonl, refuse_twins, split_source, table_rows
from coserve.state.durable import disk_errors

BEGINNING = 64 << 10
"""Bytes that tell a file's format."""
DELIMITERS = ",;\t"
MAX_UNPACKED = 16 << 30
"""Most bytes of rows in a gzip file, which may be a thousandth as large."""
AS_JSON = ("messages", "conversations", "tools")
"""Fields that are lists: in CSV, a cell contains them as JSON."""


def is_json_lines(source: Path, columns: Columns) -> bool:
    """Return whether a source is read unconverted, as JSON Lines. Raises `UnreadableCorpus`."""
    if not is_jsonl(source):
        return False
    with _opened(source) as (file, packed):
        return not packed and _other_format(file, columns) is None


@contextmanager
def _opened(source: Path) -> Iterator[tuple[BufferedReader, bool]]:
    """Open a file, and unpack it as it is read if it is compressed; yield it and whether it is. Raises
    `UnreadableCorpus`, for what is damaged, too."""
    with source_errors(), source.open("rb") as file:
        if not file.peek(len(GZIP)).startswith(GZIP):
            yield file, False
            return
        try:
            with gzip.GzipFile(fileobj=file) as packed, BufferedReader(packed, BEGINNING) as unpacked:
                yield cast("BufferedReader", unpacked), True
        except (EOFError, zlib.error) as error:
            raise UnreadableCorpus("the corpus cannot be read: the gzip file is damaged", field="path") from error


def _other_format(file: BufferedReader, columns: Columns) -> Literal["csv", "array"] | None:
    """Return the format of a text that is not JSON Lines: a JSON array, or CSV, whose first line has several columns or
    the name of a column that is read. None: JSON Lines, or an unknown format."""
    text = file.peek(BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"["):
        return "array"
    try:
        header = text.partition(b"\n")[0].decode().strip()
    except UnicodeDecodeError:
        return None
    if header.startswith("{") or not header.replace("\t", " ").isprintable():
        return None
    several = any(delimiter in header for delimiter in DELIMITERS)
    return "csv" if several or header.strip('"') in ("text", *columns.names.values()) else None


def as_json_lines(
    source: Path,
    target: Path,
    columns: Columns,
    progress: Callable[[], None],
    limits: CorpusLimits = LIMITS,
    most: int = MAX_UNPACKED,
) -> Path:
    """Return `source` itself, or `target` with the rows of a CSV file, a JSON array or a gzip file. `progress` is
    called with each row. `most`: bytes of rows in a gzip file.

    Raises `MalformedRow` with the line (for an array, the element's number), `UnreadableCorpus`, `StorageFull`,
    `StorageFailed`.
    """
    if not is_jsonl(source):
        return source
    with _opened(source) as (file, packed):
        format = _other_format(file, columns)
        if format is None and not packed:
            return source
        lines = _lines(file, format, columns, limits)
        size, most = 0, most if packed else MAX_UNPACKED
        with disk_errors():
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                for line in lines:
                    progress()
                    size += len(line) + 1
                    if size > most:
                        less = "" if most == MAX_UNPACKED else ", as many as the project's quota leaves"
                        raise UnreadableCorpus(f"expected at most {most} bytes of unpacked rows{less}", field="path")
                    out.write(line + b"\n")
    return target


def _lines(
    file: BufferedReader, format: Literal["csv", "array"] | None, columns: Columns, limits: CorpusLimits
) -> Iterator[bytes]:
    if format == "csv":
        return _csv_lines(file, columns, limits)
    return _array_lines(file, limits) if format == "array" else _json_lines(file, limits)


class _Lines:
    """Line iterator for `csv.reader`, which may read several lines for one record. `number`: line number of the last
    line; `begin` starts a record, which has at most `limit` bytes. Raises `MalformedRow`."""

    def __init__(self, file: BufferedReader, limit: int) -> None:
        self._file, self._limit = file, limit
        self.number = self.begun = 0
        self._size = 0

    def begin(self) -> None:
        self.begun, self._size = self.number + 1, 0

    def __iter__(self) -> Iterator[str]:
        while line := self._read():
            self.number += 1
            yield line

    def _read(self) -> str:
        line = self._file.readline(self._limit + 1)
        self._size += len(line)
        if self._size > self._limit:
            raise MalformedRow(
                f"expected at most {self._limit} bytes a row; a quote that begins here may have no end", line=self.begun
            )
        try:
            return (line if self.number else line.removeprefix(codecs.BOM_UTF8)).decode()
        except UnicodeDecodeError as error:
            raise MalformedRow("expected UTF-8", line=self.number + 1) from error


def _csv_lines(file: BufferedReader, columns: Columns, limits: CorpusLimits) -> Iterator[bytes]:
    csv.field_size_limit(max(csv.field_size_limit(), limits.row_bytes))  # of the process; `_Lines` bounds the row
    lines = _Lines(file, limits.row_bytes)
    beginning = file.peek(BEGINNING).decode(errors="replace").partition("\n")[0]
    delimiter = max(DELIMITERS, key=beginning.count)
    records = _records(lines, delimiter)
    header = next(records)
    refuse_twins(header)
    row_format, read = choose_columns(header, 1, columns)
    required = {field.encode_name for field in msgspec.structs.fields(row_format) if field.required}
    places = [(field, column, header.index(column)) for field, column in read.items()]
    yield from [b""] * lines.number
    for cells in records:
        limits.check_line(lines.begun)
        if not cells:
            yield b""
            continue
        if len(cells) != len(header):
            raise MalformedRow(
                f"expected {len(header)} cells, as the header has, got {len(cells)}; a text with {delimiter!r} or a "
                "line end stands in double quotes",
                line=lines.begun,
            )
        row = {
            column: _cell(field, cells[place])
            for field, column, place in places
            if cells[place].strip() or field in required
        }
        yield msgspec.json.encode(row)
        yield from [b""] * (lines.number - lines.begun)


def _records(lines: _Lines, delimiter: str) -> Iterator[list[str]]:
    """Yield CSV records. Raises `MalformedRow` with the line on which a record begins."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.begin()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = "a quote that begins here has no end" if "unexpected end" in str(error) else str(error)
            raise MalformedRow(f"expected CSV: {reason}", line=lines.begun) from error
        yield cells


def _cell(field: str, text: str) -> str | msgspec.Raw:
    if field == "label" and text.strip().lower() in ("true", "false"):
        return msgspec.Raw(text.strip().lower().encode())
    if field not in AS_JSON or not text.strip():
        return text
    return msgspec.Raw(text.replace("\r", " ").replace("\n", " ").encode())


def _json_lines(file: BufferedReader, limits: CorpusLimits) -> Iterator[bytes]:
    for number, line in enumerate(iter(lambda: file.readline(limits.row_bytes + 1), b""), start=1):
        limits.check_line(number)
        if len(line) > limits.row_bytes:
            raise MalformedRow(f"expected at most {limits.row_bytes} bytes a line", line=number)
        yield line.removesuffix(b"\n")


def _array_lines(file: BufferedReader, limits: CorpusLimits) -> Iterator[bytes]:
    for number, element in array_elements(file, limits.row_bytes):
        limits.check_line(number)
        yield element


@contextmanager
def json_lines(source: Path, columns: Columns) -> Iterator[Path]:
    """Yield a file of JSON Lines with the rows of `source`: `source` itself, or, if it is CSV, a JSON array or parquet,
    a temporary copy with the same columns and line numbers. Raises `MalformedRow` with the line, `UnreadableCorpus`,
    `StorageError`, and `InvalidRequest` for parquet without pyarrow."""
    with TemporaryDirectory(prefix="coserve-rows-") as folder:
        copy = Path(folder) / "rows.jsonl"
        if is_jsonl(source):
            yield as_json_lines(source, copy, columns, lambda: None)
            return
        with disk_errors(), copy.open("wb") as file:
            for piece in split_source(source, PieceSizes(rows=LIMITS.rows)):
                file.writelines(encoded + b"\n" for _, encoded in table_rows(piece))
        yield copy
