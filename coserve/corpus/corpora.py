"""Corpora that a helper process tokenised: a file, and what the API process must know of it. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from coserve.corpus.data import tokenize_rows
from coserve.corpus.rows import Row, parse_jsonl
from coserve.offload.protocol import Context
from coserve.state.durable import move_file


class MadeCorpus(Protocol):
    """A tokenised corpus on its way into a job's folder: a `Corpus` in memory, or a `CorpusFile`."""

    @property
    def rows(self) -> int: ...
    @property
    def token_count(self) -> int: ...
    @property
    def target_tokens(self) -> int: ...
    @property
    def rows_cut(self) -> int: ...

    def read_lengths(self) -> npt.NDArray[np.int64]: ...
    def save(self, path: Path) -> None: ...
    def discard(self) -> None: ...


class CorpusFile(msgspec.Struct, frozen=True):
    """A corpus in a staged file, alone in its folder. `save` moves it, `discard` deletes it; both delete the folder."""

    path: str
    rows: int
    token_count: int
    target_tokens: int
    rows_cut: int

    def read_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row (S)."""
        with safe_open(self.path, framework="numpy") as file:
            bounds: npt.NDArray[np.int64] = file.get_tensor("bounds")
        return np.diff(bounds)

    def save(self, path: Path) -> None:
        """Durable when it returns. Raises `StorageFull`, `StorageFailed`; then the staged file is gone."""
        try:
            move_file(Path(self.path), path, point="corpus")
        finally:
            self.discard()

    def discard(self) -> None:
        shutil.rmtree(Path(self.path).parent, ignore_errors=True)


class TokenizeFile(msgspec.Struct, frozen=True):
    """Tokenise the JSONL file `source` into `target`; rows have at most `max_length` tokens."""

    source: str
    target: str
    max_length: int


def tokenize_file(context: Context, arguments: bytes, body: bytes) -> bytes:
    """The task: a `CorpusFile` as MessagePack. Raises `CorpusError` leaves, `StorageFull`, `StorageFailed`."""
    asked = msgspec.msgpack.decode(arguments, type=TokenizeFile)
    rows = _told(parse_jsonl(Path(asked.source)), context.progress)
    corpus = tokenize_rows(rows, context.tokenizer, asked.max_length)
    corpus.save(Path(asked.target))
    return msgspec.msgpack.encode(
        CorpusFile(asked.target, corpus.rows, corpus.token_count, corpus.target_tokens, corpus.rows_cut)
    )


def _told(rows: Iterable[Row], progress: Callable[[], None]) -> Iterator[Row]:
    """The rows, with a sign of life before each."""
    for row in rows:
        progress()
        yield row
