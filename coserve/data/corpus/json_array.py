"""Reads the elements of a JSON array one at a time, as JSON: the array may be of any length. No torch."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from io import BufferedReader

from coserve.core.errors import MalformedRow

CHUNK = 64 << 10
"""Bytes read at once."""
LONGEST_WORD = 16
"""Longest escape, literal or the like in characters: it may be cut off at the end of the text read so far."""
# Finds only the ends of elements. Numbers are not converted: one of a million digits would take minutes.
_decoder = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=len)


def array_elements(file: BufferedReader, limit: int, chunk: int = CHUNK) -> Iterator[tuple[int, bytes]]:
    """Yield each element's number, from 1, and the element, of about `limit` bytes at most, on one line. `chunk` bytes
    are read at once. Raises `MalformedRow`, with the element's number as its line."""
    array = _Array(file, limit, chunk)
    array.expect("[")
    if array.next_character() == "]":
        array.expect("]")
    else:
        while True:
            array.number += 1
            yield array.number, array.element()
            if array.expect(",]") == "]":
                break
    if after := array.next_character():
        raise MalformedRow(f"expected nothing after the array, got {after!r}", line=max(1, array.number))


class _Array:
    """Reads a JSON array piece by piece. `number`: the current element's, from 1. Raises `MalformedRow`."""

    def __init__(self, file: BufferedReader, limit: int, chunk: int) -> None:
        self._file, self._limit, self._chunk = file, limit, chunk
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._ended = "", 0, False
        self.number = 0

    def _read(self, size: int) -> None:
        content = self._file.read(size)
        try:
            more = self._decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            raise MalformedRow("expected UTF-8", line=max(1, self.number)) from error
        self._text, self._at, self._ended = self._text[self._at :] + more, 0, not content

    def next_character(self) -> str:
        """Return the next character that is not white space; empty at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._read(self._chunk)

    def expect(self, characters: str) -> str:
        found = self.next_character()
        if not found or found not in characters:
            wanted = " or ".join(map(repr, characters))
            raise MalformedRow(
                f"expected {wanted}, got {found!r}" if found else "the array has no end", line=max(1, self.number)
            )
        self._at += 1
        return found

    def element(self) -> bytes:
        """Return the next element, on one line."""
        if not self.next_character():
            raise MalformedRow("the array has no end", line=self.number)
        size = self._chunk
        while True:
            try:
                _, end = _decoder.raw_decode(self._text, self._at)
                whole = end < len(self._text) or self._ended  # a number may continue in the next read
            except json.JSONDecodeError as error:
                cut_off = error.pos >= len(self._text) - LONGEST_WORD or error.msg.startswith("Unterminated string")
                if self._ended or not cut_off:
                    reason = error.msg.removesuffix(" at")
                    raise MalformedRow(
                        f"expected JSON: {reason} at character {error.pos - self._at + 1}", line=self.number
                    ) from error
                whole = False
            except RecursionError as error:
                raise MalformedRow("expected JSON of moderate depth", line=self.number) from error
            if whole:
                break
            if len(self._text) - self._at > self._limit:
                raise MalformedRow(f"expected at most {self._limit} bytes a row", line=self.number)
            self._read(size)
            size *= 2  # doubled, so that a long element is decoded only a few times
        found = self._text[self._at : end].replace("\r", " ").replace("\n", " ")
        self._at = end
        return found.encode()
