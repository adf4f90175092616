"""Corpora read, tokenised and staged in one process, as helper processes do it piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from coserve.core.errors import CorpusError
from coserve.data.corpus.rows import Row
from coserve.data.corpus.sources import PIECES, PieceReader, PieceSizes, split_source
from coserve.data.corpus.staging import CorpusPart, JoinParts, StagedCorpus, TokenizePiece, join_parts, tokenize_piece
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
    sizes: PieceSizes = PIECES,
) -> StagedCorpus:
    """A source's corpus, in `target`."""
    context, parts = TaskContext(tokenizer, lambda: None), []
    for number, piece in enumerate(split_source(source, sizes)):
        part = target.with_name(f"part-{number}")
        request = msgspec.msgpack.encode(TokenizePiece(piece, str(part), max_length, pairs=pairs))
        parts.append(msgspec.msgpack.decode(tokenize_piece(context, request, b""), type=CorpusPart))
    joined = join_parts(context, msgspec.msgpack.encode(JoinParts(parts, str(target))), b"")
    return msgspec.msgpack.decode(joined, type=StagedCorpus)
