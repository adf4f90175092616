"""Reads rows from JSONL files, strictly. No torch."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

from coserve.core.errors import MalformedRow, UnreadableCorpus
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.limits import LIMITS, CorpusLimits
from coserve.data.corpus.rows import Row, parse_row
from coserve.state.durable import disk_errors

BLOCK = 1 << 20
"""Bytes of a line that are skipped at once."""
MAX_DIGITS = 1000
"""Most digits of an integer: the time to parse one grows with the square of its digits."""
GZIP = b"\x1f\x8b"
"""First bytes of a gzip file, which is unpacked before it is read."""
_OTHER_FORMATS = {
    GZIP: "a gzip file",
    b"PK\x03\x04": "a zip file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Formats that users send instead of JSON Lines, by their first bytes."""
_FORMATS = (
    "; a corpus is JSON Lines (one object a line), a JSON array, CSV or parquet; a text without rows is learned as a "
    "document (coserve learn)"
)


def parse_jsonl(source: bytes | Path, limits: CorpusLimits = LIMITS, columns: Columns | None = None) -> Iterator[Row]:
    """Yield the rows of a JSONL file, read line by line; empty lines are skipped but counted.

    Raises `MalformedRow` with the line: not JSON, not UTF-8, a duplicate or unknown field, NaN or Infinity, more than
    `limits` allow. Raises `UnreadableCorpus` for a file that cannot be opened.
    """
    for line, row in enumerate(parse_lines(source, limits, columns=columns), start=1):
        limits.check_line(line)
        if row is not None:
            yield row


def parse_lines(
    source: bytes | Path, limits: CorpusLimits, start: int = 0, stop: int | None = None, columns: Columns | None = None
) -> Iterator[Row | None]:
    """Yield the row of each line that begins within the bytes `start` to `stop` (exclusive; None: the end); None for an
    empty line.

    Lines count from 1 at `start`. Raises as `parse_jsonl`, except for the number of rows.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else _open(source) as file:
        _seek_line(file, start)
        line, position = 1, file.tell()
        while (stop is None or position < stop) and (content := file.readline(limits.row_bytes + 1)):
            if position == 0:
                _refuse_other_formats(content)
            if len(content) > limits.row_bytes:
                raise MalformedRow(f"expected at most {limits.row_bytes} bytes a line", line=line)
            text = content.removeprefix(codecs.BOM_UTF8) if position == 0 else content
            yield parse_row(_decode_line(text, line), line, columns) if text.strip() else None
            line, position = line + 1, position + len(content)


def _refuse_other_formats(beginning: bytes) -> None:
    """Raise `MalformedRow`, with the format's name, for a file that is not JSON Lines."""
    for magic, name in _OTHER_FORMATS.items():
        if beginning.startswith(magic):
            raise MalformedRow(f"expected JSON Lines in UTF-8, got {name}", line=1)


def _seek_line(file: BinaryIO, start: int) -> None:
    """Go to the first line that begins at `start` or after it."""
    if start > 0:
        file.seek(start - 1)
        while (skipped := file.readline(BLOCK)) and not skipped.endswith(b"\n"):
            pass


def _open(path: Path) -> BinaryIO:
    with source_errors(), disk_errors():
        return path.open("rb")


@contextmanager
def source_errors() -> Iterator[None]:
    """Raise the system's errors about a source as `UnreadableCorpus`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or "it is damaged"
        raise UnreadableCorpus(f"the corpus cannot be read: {reason}", field="path") from error


def _decode_line(content: bytes, line: int) -> object:
    """Decode strict JSON: no NaN, no Infinity, no duplicate field."""
    try:
        text = content.decode().rstrip("\r\n")  # strip first: an error at the end then names this line, not the next
        found: object = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_finite, parse_int=_integer
        )
    except UnicodeDecodeError as error:
        raise MalformedRow("expected UTF-8", line=line) from error
    except json.JSONDecodeError as error:
        message = f"expected JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        hint = _FORMATS if line == 1 and (text == "{" or error.colno == 1) else ""
        raise MalformedRow(message + hint, line=line) from error
    except ValueError as error:
        raise MalformedRow(str(error)[:200], line=line) from error
    except RecursionError as error:
        raise MalformedRow("expected JSON of moderate depth", line=line) from error
    return found


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"field {twice!r:.80} twice in one object")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"expected a finite number, got {constant}")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"expected a number of at most {MAX_DIGITS} digits, got {len(digits)}")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        _refuse(digits[:40])
    return number
