"""Corpora read, tokenised and staged in one process, as helper processes do it piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coserve.core.errors import CorpusError
from coserve.data.corpus.rows import Row, parse_row
from coserve.data.corpus.sources import PIECES, PieceReader, PieceSizes, split_source
from coserve.data.corpus.staging import StagedCorpus, join_parts, tokenize_piece
from coserve.data.corpus.tokenize import Tokenization
from coserve.data.offload.protocol import TaskContext
from coserve.data.pretrained.tokenizer import Tokenizer


def read_rows(source: Path, sizes: PieceSizes = PIECES) -> Iterator[Row]:
    """All rows of a source, with their lines in it."""
    lines = 0
    for piece in split_source(source, sizes):
        reader = PieceReader(piece)
        try:
            for row in reader:
                yield replace(row, line=lines + row.line)
        except CorpusError as error:
            raise error.moved(lines) from error
        lines += reader.lines


def stage(
    source: Path,
    target: Path,
    tokenizer: Tokenizer,
    max_length: int,
    *,
    pairs: bool = False,
    labelled: bool = False,
    sizes: PieceSizes = PIECES,
) -> StagedCorpus:
    """A source's corpus, in `target`."""
    context, parts = TaskContext(tokenizer, lambda: None), []
    for number, piece in enumerate(split_source(source, sizes)):
        part = target.with_name(f"part-{number}")
        options = Tokenization(max_length, pairs=pairs, labelled=labelled)
        parts.append(tokenize_piece(context, piece, str(part), options, {}))
    return join_parts(context, parts, str(target))


def check_tables_of(row: dict[str, Any], folder: Path) -> None:
    """Parquet and a saved dataset of two such rows hold what JSONL would."""
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    pytest.importorskip("pyarrow.parquet")
    parquet, expected = folder / "rows.parquet", [parse_row(row, line) for line in (1, 2)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), parquet)
    assert list(read_rows(parquet)) == expected
    datasets.Dataset.from_list([row, row]).save_to_disk(folder / "saved")
    assert list(read_rows(folder / "saved")) == expected
