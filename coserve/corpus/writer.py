"""Writes a corpus file row by row: memory does not grow with the corpus. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from coserve.state.durable import disk_errors
from coserve.state.failpoints import failpoint

HEADER = 512
"""Bytes kept free at the file's beginning for its header, which has the sizes."""
BUFFER = 1 << 20


class CorpusWriter:
    """A new file that `Corpus.load` reads; a context. Tokens are written in place, the other arrays beside it until `finish`.

    Every method raises `StorageFull` and `StorageFailed`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = self.token_count = self.target_tokens = self._pairs = 0
        with contextlib.ExitStack() as opened, disk_errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._tokens, self._target, self._bounds, self._splits = (
                opened.enter_context(path.with_name(path.name + part).open("x+b", buffering=BUFFER))
                for part in ("", ".target", ".bounds", ".splits")
            )
            self._tokens.write(bytes(HEADER))
            self._bounds.write(np.zeros(1, np.int64).tobytes())
            self._files = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with disk_errors():
            self._files.close()

    def add(self, tokens: npt.NDArray[np.int32], target: npt.NDArray[np.uint8], split: int | None = None) -> None:
        """A row: its tokens (n), and which of them are learned (n). `split`: of a pair, tokens of its first sequence. All rows are
        pairs, or none."""
        self.rows += 1
        self._pairs += split is not None
        assert self._pairs in (0, self.rows), "expected pairs only, or none"
        self.token_count += len(tokens)
        self.target_tokens += int(target.sum())
        with disk_errors():
            self._tokens.write(tokens.tobytes())
            self._target.write(target.tobytes())
            self._bounds.write(np.int64(self.token_count).tobytes())
            if split is not None:
                self._splits.write(np.int64(self.token_count - len(tokens) + split).tobytes())

    def finish(self) -> None:
        """Complete the file. It is durable when this returns."""
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
            for part in (self._target, self._bounds, self._splits):
                _append(self._tokens, part)
            self._tokens.seek(0)
            self._tokens.write(len(text).to_bytes(8, "little") + text)
            self._tokens.flush()
            failpoint("corpus.before_file_fsync")
            os.fsync(self._tokens.fileno())
            failpoint("corpus.after_file_fsync")


def _append(file: BinaryIO, part: BinaryIO) -> None:
    part.seek(0)
    shutil.copyfileobj(part, file, BUFFER)
