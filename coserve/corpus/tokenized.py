"""A tokenised corpus: the arrays that a job trains on, and their safetensors file. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from coserve.cancellation import unchecked
from coserve.errors import CheckpointUnreadable
from coserve.state.durable import safetensors_errors, write_file
from coserve.state.failpoints import failpoint

READ_ELEMENTS = 1 << 20
"""Elements read from a file at once: safetensors holds the interpreter's lock while it copies."""


@dataclass(frozen=True)
class Corpus:
    """S rows of N tokens in all, concatenated.

    `tokens`: int32 (N). `target`: uint8 (N), 1 for tokens that contribute to the loss. `bounds`: int64 (S + 1), ascending from
    0 to N; row i is `bounds[i]:bounds[i + 1]`. `splits`: int64 (S), of a corpus of pairs: row i is the prompt with the chosen answer,
    and from `splits[i]` on the prompt with the rejected one.
    """

    tokens: npt.NDArray[np.int32]
    target: npt.NDArray[np.uint8]
    bounds: npt.NDArray[np.int64]
    splits: npt.NDArray[np.int64] | None = None
    rows_cut: int = 0
    """Rows truncated to `max_length`. Not stored in the file: 0 after `load`."""

    @property
    def rows(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row (S)."""
        return np.diff(self.bounds)

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    def read_lengths(self) -> npt.NDArray[np.int64]:
        return self.lengths

    def discard(self) -> None:
        """Nothing to do: the corpus is in memory only."""

    @property
    def target_tokens(self) -> int:
        return int(self.target.sum())

    def row(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Tokens int32 (n) and targets uint8 (n) of one row."""
        here = slice(self.bounds[index], self.bounds[index + 1])
        return self.tokens[here], self.target[here]

    def sequences(self, index: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        """The sequences of one row, each as by `row`: the row itself, or both of a pair."""
        if self.splits is None:
            return [self.row(index)]
        start, split, stop = self.bounds[index], self.splits[index], self.bounds[index + 1]
        return [(self.tokens[first:last], self.target[first:last]) for first, last in ((start, split), (split, stop))]

    def save(self, path: Path) -> None:
        """Durable when it returns. Raises `StorageFull`, `StorageFailed`."""
        arrays = {"tokens": self.tokens, "target": self.target, "bounds": self.bounds}
        if self.splits is not None:
            arrays["splits"] = self.splits
        write_file(path, safetensors.numpy.save(arrays), point="corpus")

    @classmethod
    def load(cls, path: Path, check: Callable[[], None] = unchecked) -> Corpus:
        """Read and validate a file that `save` wrote. `check` is called between reads and may raise.

        Raises `CheckpointUnreadable` for a missing or damaged file, `StorageError` where the machine cannot read it now.
        """
        try:
            with safetensors_errors(path):
                failpoint("job.open")
                with safe_open(path, framework="numpy") as file:
                    tokens, target, bounds = (_read(file, name, check) for name in ("tokens", "target", "bounds"))
                    splits = _read(file, "splits", check) if "splits" in file.keys() else None  # noqa: SIM118 - no dict
            corpus = cls(tokens, target, bounds, splits)
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointUnreadable("the job's corpus cannot be read") from error
        if not corpus.is_valid():
            raise CheckpointUnreadable("the job's corpus is damaged")
        return corpus

    def is_valid(self) -> bool:
        """Whether dtypes, shapes, bounds and values are those that `tokenize_rows` makes."""
        tokens, target, bounds = self.tokens, self.target, self.bounds
        typed = [array.dtype for array in (tokens, target, bounds)] == [np.int32, np.uint8, np.int64]
        shaped = tokens.ndim == target.ndim == bounds.ndim == 1 and len(tokens) == len(target) and len(bounds) > 1
        if not (
            typed and shaped and bounds[0] == 0 and bounds[-1] == len(tokens) and bool(np.all(np.diff(bounds) > 0))
        ):
            return False
        if not (bool(np.all(tokens >= 0)) and bool(np.all(target <= 1)) and not target[bounds[:-1]].any()):
            return False
        return self.splits is None or self._splits_are_valid(self.splits)

    def _splits_are_valid(self, splits: npt.NDArray[np.int64]) -> bool:
        bounds = self.bounds
        if splits.dtype != np.int64 or splits.shape != (self.rows,):
            return False
        inside = bool(np.all((bounds[:-1] < splits) & (splits < bounds[1:])))
        return inside and not self.target[splits].any()


def _read(file: safe_open, name: str, check: Callable[[], None]) -> npt.NDArray[Any]:
    """Read one array (N) in its stored dtype, `READ_ELEMENTS` at a time."""
    whole = file.get_slice(name)  # type: ignore[no-untyped-call]
    (size,) = whole.get_shape()
    if size == 0:
        raise CheckpointUnreadable("the job's corpus is damaged")
    parts = []
    for start in range(0, size, READ_ELEMENTS):
        check()
        parts.append(whole[start : min(start + READ_ELEMENTS, size)])
    return np.concatenate(parts)
