"""Reads a local file of rows in any format of a corpus, for commands that send rows to a daemon. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from coserve.data.corpus.columns import Columns
from coserve.data.corpus.conversion import as_json_lines
from coserve.data.corpus.rows import LIMITS
from coserve.data.corpus.sources import PieceSizes, is_jsonl, split_source, table_rows
from coserve.state.durable import disk_errors


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
