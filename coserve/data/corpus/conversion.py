"""Converts CSV files and JSON arrays to JSON Lines, which several processes can read in pieces. No torch.

Both are converted in bounded memory. Rows keep their numbers: a CSV record stays on the line where it began (lines
without a record are empty), and array elements are numbered.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Literal

import msgspec

from coserve.core.errors import MalformedRow
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.json_array import array_elements
from coserve.data.corpus.jsonl import source_errors
from coserve.data.corpus.rows import LIMITS, CorpusLimits, choose_columns
from coserve.data.corpus.sources import is_jsonl, refuse_twins
from coserve.state.durable import disk_errors

BEGINNING = 64 << 10
"""Bytes that tell a file's format."""
DELIMITERS = ",;\t"
AS_JSON = ("messages", "conversations", "tools")
"""Fields that are lists: in CSV, a cell contains them as JSON."""


def is_json_lines(source: Path, columns: Columns) -> bool:
    """Return whether a source is read unconverted, as JSON Lines. Raises `UnreadableCorpus`."""
    if not is_jsonl(source):
        return False
    with source_errors(), source.open("rb") as file:
        return _other_format(file, columns) is None


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
    source: Path, target: Path, columns: Columns, progress: Callable[[], None], limits: CorpusLimits = LIMITS
) -> Path:
    """Return `source` itself, or `target` with the rows of a CSV file or JSON array. `progress` is called with each
    row.

    Raises `MalformedRow` with the line (for an array, the element's number), `UnreadableCorpus`, `StorageFull`,
    `StorageFailed`.
    """
    if not is_jsonl(source):
        return source
    with source_errors(), source.open("rb") as file:
        format = _other_format(file, columns)
        if format is None:
            return source
        lines = _csv_lines(file, columns, limits) if format == "csv" else _array_lines(file, limits)
        with disk_errors():
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                for line in lines:
                    progress()
                    out.write(line + b"\n")
    return target


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
    if field not in AS_JSON or not text.strip():
        return text
    return msgspec.Raw(text.replace("\r", " ").replace("\n", " ").encode())


def _array_lines(file: BufferedReader, limits: CorpusLimits) -> Iterator[bytes]:
    for number, element in array_elements(file, limits.row_bytes):
        limits.check_line(number)
        yield element
