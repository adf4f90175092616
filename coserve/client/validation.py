"""Rows for validation that `finetune` sends behind those to learn; the daemon holds the corpus's last rows back."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from coserve.client.json_values import check, encode
from coserve.client.options import as_struct, rows_of
from coserve.core.errors import EmptyCorpus, InvalidRequest
from coserve.core.training.held_rows import append_lines, count_rows, own_lines
from coserve.core.training.settings import TrainingRequest

Rows = Iterable[Mapping[str, Any]] | Path | str | bytes
"""Rows, or a file of JSON Lines: its path or content."""


@asynccontextmanager
async def joined_rows(
    rows: Rows, validation: Rows, training: TrainingRequest | Mapping[str, Any] | None
) -> AsyncIterator[tuple[Path, TrainingRequest]]:
    """Yield a file of both, deleted when the block ends, and the settings with the number of its last rows, which are
    for validation. Errors in these that the block raises tell the line within `validation`.

    Raises `InvalidRequest` for a file that is not JSON Lines, and for `validation_rows` in `training`; `EmptyCorpus`.
    """
    settings = as_struct({} if training is None else training, TrainingRequest, "training")
    if settings.validation_rows:
        raise InvalidRequest("expected no training.validation_rows beside validation", field="validation")
    with TemporaryDirectory(prefix="coserve-rows-") as name:
        folder = Path(name)
        learned = await asyncio.to_thread(_file, rows, folder / "rows", "data")
        held = await asyncio.to_thread(_file, validation, folder / "validation", "validation")
        if (count := await asyncio.to_thread(count_rows, held)) == 0:
            raise EmptyCorpus("expected rows to measure the loss on, got none", field="validation")
        joined = folder / "joined"
        lines = await asyncio.to_thread(append_lines, learned, joined)
        await asyncio.to_thread(append_lines, held, joined)
        with own_lines(lines, "validation"):
            yield joined, msgspec.structs.replace(settings, validation_rows=count)


def _file(rows: Rows, target: Path, field: str) -> Path:
    """Return the file of JSON Lines: the caller's, or `target` with the rows."""
    if isinstance(rows, str | Path):
        target = Path(rows)
        if not target.is_file():
            raise InvalidRequest(f"expected a file of rows, got {str(rows)!r}", field=field)
    elif isinstance(rows, bytes):
        target.write_bytes(rows)
    else:
        found = rows_of(rows, field)
        check(found, field)
        target.write_bytes(b"".join(encode(row, f"{field}[{number}]") + b"\n" for number, row in enumerate(found)))
    with target.open("rb") as file:
        beginning = file.peek().removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if beginning not in (b"{", b""):
        raise InvalidRequest(
            "expected JSON Lines, as rows and rows for validation are sent as one file; coserve finetune "
            "--validation-file converts CSV, parquet and JSON arrays",
            field=field,
        )
    return target
