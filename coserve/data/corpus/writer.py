"""Writes a corpus file row by row: memory does not grow with the corpus. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from coserve.core.cancellation import unchecked
from coserve.state.durable import disk_errors
from coserve.state.failpoints import failpoint

HEADER = 512
"""Bytes reserved at the beginning of the file for the header, which contains the sizes."""
BUFFER = 1 << 20
PARTS = ("", ".target", ".lengths", ".splits")
"""Suffixes of the files of an unfinished corpus: tokens, targets, tokens of each row, tokens of each pair's first
sequence."""
ITEMS = BUFFER // 8
"""Numbers of `.lengths` and `.splits` that are converted at once."""


class CorpusWriter:
    """Context that writes a new file for `Corpus.load`. Tokens are written in place; the other arrays go to separate
    files until `finish` joins them. Without `finish`, the files are a piece of a corpus, which `append` reads.

    Every method raises `StorageFull` and `StorageFailed`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = self.token_count = self.target_tokens = self._pairs = 0
        with contextlib.ExitStack() as opened, disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._tokens, self._target, self._lengths, self._splits = (
                opened.enter_context(file.open("x+b", buffering=BUFFER)) for file in _files(path)
            )
            self._tokens.write(bytes(HEADER))
            self._files = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with disk_errors():
            self._files.close()

    def add(self, tokens: npt.NDArray[np.int32], target: npt.NDArray[np.uint8], split: int | None = None) -> None:
        """Add a row: its tokens (n), and 1 for those that are targets (n). `split`: tokens of a pair's first sequence.
        All rows are pairs, or none."""
        self.rows += 1
        self._pairs += split is not None
        assert self._pairs in (0, self.rows), "expected pairs only, or none"
        self.token_count += len(tokens)
        self.target_tokens += int(target.sum())
        with disk_errors():
            self._tokens.write(tokens.tobytes())
            self._target.write(target.tobytes())
            self._lengths.write(np.int64(len(tokens)).tobytes())
            if split is not None:
                self._splits.write(np.int64(split).tobytes())

    def append(self, part: Path, target_tokens: int) -> None:
        """Append all rows of a piece, and delete its files."""
        with disk_errors():
            for source, file in zip(
                _files(part), (self._tokens, self._target, self._lengths, self._splits), strict=True
            ):
                with source.open("rb") as content:
                    content.seek(HEADER if file is self._tokens else 0)
                    shutil.copyfileobj(content, file, BUFFER)
                source.unlink()
            self.rows = self._lengths.tell() // 8
            self._pairs = self._splits.tell() // 8
            self.token_count = self._target.tell()
        self.target_tokens += target_tokens
        assert self._pairs in (0, self.rows), "expected pairs only, or none"

    def finish(self, progress: Callable[[], None] = unchecked) -> None:
        """Complete the file. It is durable when this returns. `progress` is called between writes."""
        header: dict[str, object] = {}
        end = 0
        for name, dtype, count, size in (
            ("tokens", "I32", self.token_count, 4),
            ("target", "U8", self.token_count, 1),
            ("bounds", "I64", self.rows + 1, 8),
            *([("splits", "I64", self.rows, 8)] if self._pairs else []),
        ):
            header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [end, end + size * count]}
            end += size * count
        text = json.dumps(header, separators=(",", ":")).encode().ljust(HEADER - 8)
        with disk_errors():
            failpoint("corpus.temp_write")
            self._target.seek(0)
            while content := self._target.read(BUFFER):
                progress()
                self._tokens.write(content)
            self._tokens.write(np.int64(0).tobytes())
            for ends, _ in self._ends():
                self._tokens.write(ends.tobytes())
            if self._pairs:
                self._splits.seek(0)
                for ends, lengths in self._ends():
                    splits = np.frombuffer(self._splits.read(8 * len(ends)), np.int64)
                    self._tokens.write((ends - lengths + splits).tobytes())
            self._tokens.seek(0)
            self._tokens.write(len(text).to_bytes(8, "little") + text)
            self._tokens.flush()
            failpoint("corpus.before_file_fsync")
            os.fsync(self._tokens.fileno())
            failpoint("corpus.after_file_fsync")

    def _ends(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield, for `ITEMS` rows at a time: each row's end among all tokens, and its number of tokens."""
        self._lengths.seek(0)
        end = 0
        while content := self._lengths.read(8 * ITEMS):
            lengths = np.frombuffer(content, np.int64)
            ends = end + np.cumsum(lengths)
            end = int(ends[-1])
            yield ends, lengths


def _files(path: Path) -> Iterator[Path]:
    return (path.with_name(path.name + part) for part in PARTS)
