"""BurstGPT's traces (Wang et al., arXiv 2401.17644): CSV with a header, times in seconds, lengths in tokens, no texts.

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    5,ChatGPT,472,18,490,Conversation log

Other columns (`Session ID`, `Elapsed time`) are ignored. Rows without response tokens are failed requests; they are
skipped.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from coserve.core.errors import MalformedRow
from coserve.workloads.formats.lines import MAX_TOKENS, Recorded, check_order, not_utf8, reading

TIME, MODEL, PROMPT, OUTPUT = "Timestamp", "Model", "Request tokens", "Response tokens"


def read_burstgpt(path: Path, model: str | None = None) -> Iterator[Recorded]:
    """Yield the requests of `model` (None: of all models). Raises `MalformedRow` with the line, `InvalidRequest` for a
    missing file."""
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            yield from _rows(reader, model)
        except csv.Error as error:
            raise MalformedRow(f"expected CSV, got {error}", line=reader.line_num + 1) from error
        except UnicodeDecodeError as error:
            raise not_utf8(path, error) from error


def _rows(reader: Iterator[list[str]], model: str | None) -> Iterator[Recorded]:
    header = next(reader, [])
    needed = [TIME, PROMPT, OUTPUT] + ([] if model is None else [MODEL])
    if missing := [name for name in needed if name not in header]:
        raise MalformedRow(f"expected columns {', '.join(needed)}, got no {', '.join(missing)}", line=1)
    column = {name: header.index(name) for name in needed}
    before = 0.0
    for row in reader:
        line: int = reader.line_num  # type: ignore[attr-defined]  # of csv's reader
        if not row:
            continue
        if len(row) != len(header):
            raise MalformedRow(f"expected {len(header)} fields, got {len(row)}", line=line)
        at = _number(row[column[TIME]], TIME, line)
        check_order(at, before, line)
        before = at
        prompt, output = (_tokens(row[column[name]], name, line) for name in (PROMPT, OUTPUT))
        if prompt and output and (model is None or row[column[MODEL]] == model):
            yield Recorded(at, prompt, output)


def _number(text: str, name: str, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise MalformedRow(f"{name}: expected a number of at least 0, got {text[:40]!r}", line=line)
    return value


def _tokens(text: str, name: str, line: int) -> int:
    if not (text.strip().isascii() and text.strip().isdigit()):
        raise MalformedRow(f"{name}: expected a number of tokens, got {text[:40]!r}", line=line)
    tokens = int(text[:20])
    if tokens > MAX_TOKENS:
        raise MalformedRow(f"{name}: expected at most {MAX_TOKENS} tokens, got {text[:40]}", line=line)
    return tokens
