"""Reads the objects of a JSON file one at a time: from an array of any length, or one object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from coserve.core.errors import MalformedRow
from coserve.workloads.formats.lines import naming, not_json, not_utf8, unreadable

CHUNK = 1 << 18
MAX_OBJECT = 1 << 24
"""Maximum characters of an object. It bounds the memory that a file can take."""
_MARGIN = 16
"""Characters. An error nearer than this to the end of the buffer may be due to truncation, so more is read first."""


def read_objects(
    path: Path, *, chunk: int = CHUNK, max_object: int = MAX_OBJECT
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each object with the number of its first line. The file is read `chunk` characters at a time; `max_object`
    is the approximate maximum of an object's characters.

    Raises `MalformedRow` (with the line) for anything but objects, `InvalidRequest` for a missing file.
    """
    try:
        with naming(path), path.open(encoding="utf-8-sig") as file:
            reader = _Reader(file, chunk, max_object)
            try:
                yield from reader.objects()
            except UnicodeDecodeError as error:
                raise not_utf8(path, error) from error
    except OSError as error:
        raise unreadable(error) from error


class _Reader:
    """A JSON file with a buffer. `text` is the part in memory, `position` the index of the next character in it."""

    def __init__(self, file: TextIO, chunk: int, max_object: int) -> None:
        self._file, self._decoder = file, json.JSONDecoder()
        self._chunk, self._max_object = chunk, max_object
        self.text, self.position, self._line = "", 0, 1

    def line_at(self, position: int) -> int:
        return self._line + self.text.count("\n", 0, position)

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        first = self._next()
        if first == "[":
            self.position += 1
            yield from self._array()
        elif first:
            while self._next():
                yield self._object()

    def _array(self) -> Iterator[tuple[int, dict[str, Any]]]:
        if self._next() != "]":
            yield self._object()
            while self._next() == ",":
                self.position += 1
                yield self._object()
        if self._next() != "]":
            raise self._wrong("a comma or the end of the array")
        self.position += 1
        if self._next():
            raise self._wrong("nothing after the array")

    def _object(self) -> tuple[int, dict[str, Any]]:
        if self._next() != "{":
            raise self._wrong("an object")
        line = self.line_at(self.position)
        while True:
            try:
                value, self.position = self._decoder.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                cut = error.pos > len(self.text) - _MARGIN or error.msg.startswith("Unterminated")
                if not cut or len(self.text) - self.position > self._max_object or not self._more():
                    raise MalformedRow(
                        f"expected a JSON object, got an error at line {self.line_at(error.pos)}: {error.msg}",
                        line=line,
                    ) from error
            except RecursionError as error:
                raise not_json(error, line) from error
            else:
                return line, value

    def _next(self) -> str:
        """Return the next character that is not white space; empty at the end of the file."""
        while True:
            while self.position < len(self.text) and self.text[self.position].isspace():
                self.position += 1
            if self.position < len(self.text):
                return self.text[self.position]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read at least as many characters as are kept, and drop the decoded ones. Return False at the end of the
        file."""
        new = self._file.read(max(self._chunk, len(self.text) - self.position))
        self._line = self.line_at(self.position)
        self.text, self.position = self.text[self.position :] + new, 0
        return bool(new)

    def _wrong(self, expected: str) -> MalformedRow:
        found = self.text[self.position : self.position + 20]
        return MalformedRow(
            f"expected {expected}, got {found!r}" if found else f"expected {expected}, got the end of the file",
            line=self.line_at(self.position),
        )
