"""A tokenised corpus: the arrays that a job trains on, and the memory-mapped safetensors file that holds them. No
torch.

The safetensors library copies what it reads, so this reads the format itself: eight bytes with the header's size, the
header as JSON, the arrays' bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors.numpy

from coserve.core.cancellation import unchecked
from coserve.core.errors import CheckpointUnreadable
from coserve.core.validation import decoder_of
from coserve.state.durable import read_errors, write_file
from coserve.state.failpoints import failpoint

UNDESIRABLE = 2
"""Value of `Corpus.target` at the tokens of an answer whose label is false (KTO)."""
REST = -1
"""Candidate that stands for all tokens but the target's other candidates that have a weight."""
BLOCK = 1 << 18
"""Elements of an array that are checked at once."""


@dataclass(frozen=True)
class Corpus:
    """S rows of N tokens in all, concatenated.

    `tokens`: int32 (N). `target`: uint8 (N), 1 or `UNDESIRABLE` for tokens that contribute to the loss, else 0.
    `bounds`: int64 (S + 1), ascending from 0 to N; row i is `bounds[i]:bounds[i + 1]`. `splits`: int64 (S), for a
    corpus of pairs only: row i is the prompt with the chosen answer, then, from `splits[i]` on, the prompt with the
    rejected answer.

    `candidates`: int32 (M * C), for a corpus of soft targets only: C tokens for each of its M targets, in order, with
    their weights in the loss, `weights`: fp32 (M * C), at least 0. A candidate may be `REST`, but not the first one.
    """

    tokens: npt.NDArray[np.int32]
    target: npt.NDArray[np.uint8]
    bounds: npt.NDArray[np.int64]
    splits: npt.NDArray[np.int64] | None = None
    rows_cut: int = 0
    """Rows truncated to `max_length`. Not stored in the file: 0 after `load`."""
    candidates: npt.NDArray[np.int32] | None = None
    weights: npt.NDArray[np.float32] | None = None

    @property
    def rows(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row (S)."""
        return np.diff(self.bounds)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max())

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    def arrays(self) -> Corpus:
        return self

    def discard(self) -> None:
        """Do nothing: the corpus is in memory only."""

    @property
    def target_tokens(self) -> int:
        return int(np.count_nonzero(self.target))

    def row(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Tokens int32 (n) and targets uint8 (n) of one row."""
        here = slice(self.bounds[index], self.bounds[index + 1])
        return self.tokens[here], self.target[here]

    @cached_property
    def _targets_before(self) -> npt.NDArray[np.int64]:
        """Number of targets before each row, and the total: (S + 1)."""
        return np.concatenate([[0], np.cumsum(np.add.reduceat(self.target, self.bounds[:-1], dtype=np.int64))])

    def soft_targets(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """Candidates int64 and weights fp32 (k, C) of one row's targets; None: the targets are the tokens."""
        if self.candidates is None or self.weights is None:
            return None
        first, last = (int(self._targets_before[each]) for each in (index, index + 1))
        shape = (int(self._targets_before[-1]), -1)
        labels, weights = (array.reshape(shape)[first:last] for array in (self.candidates, self.weights))
        return labels.astype(np.int64), np.asarray(weights)

    def sequences(self, index: int) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
        """Return the sequences of one row, each as `row` returns it: the row itself, or both sequences of a pair."""
        if self.splits is None:
            return [self.row(index)]
        start, split, stop = self.bounds[index], self.splits[index], self.bounds[index + 1]
        return [(self.tokens[first:last], self.target[first:last]) for first, last in ((start, split), (split, stop))]

    def save(self, path: Path) -> None:
        """Write the corpus to `path`; durable when this returns. Raises `StorageFull`, `StorageFailed`."""
        write_file(path, self._packed(), point="corpus")

    @property
    def digest(self) -> str:
        """SHA-256 of the file that `save` writes, hex."""
        return hashlib.sha256(self._packed()).hexdigest()

    def _packed(self) -> bytes:
        names = ("tokens", "target", "bounds", "splits", "candidates", "weights")
        arrays = {name: array for name in names if (array := getattr(self, name)) is not None}
        packed: bytes = safetensors.numpy.save(arrays)
        return packed

    @classmethod
    def load(cls, path: Path, check: Callable[[], None] = unchecked, *, digest: str | None = None) -> Corpus:
        """Validate a file that `save` wrote, and map it: the arrays are read-only and take no memory of this process.

        `check` is called between reads and may raise. `digest`: the file's SHA-256, if known. Raises
        `CheckpointUnreadable` for a missing or damaged file, `StorageError` if the machine cannot read it now.
        """
        try:
            with read_errors():
                failpoint("job.open")
                if digest is not None and file_digest(path, check) != digest:
                    raise CheckpointUnreadable("the job's corpus is damaged: its SHA-256 differs")
                arrays = map_arrays(path)
            tokens, target, bounds = arrays["tokens"], arrays["target"], arrays["bounds"]
            soft = {"candidates": arrays.get("candidates"), "weights": arrays.get("weights")}
            corpus = cls(tokens, target, bounds, arrays.get("splits"), 0, **soft)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointUnreadable("the job's corpus cannot be read") from error
        if not corpus.is_valid(check):
            raise CheckpointUnreadable("the job's corpus is damaged")
        return corpus

    def is_valid(self, check: Callable[[], None] = unchecked) -> bool:
        """Return whether dtypes, shapes, bounds and values are as `tokenize_rows` makes them. Reads `BLOCK` elements at
        a time."""
        tokens, target, bounds, splits = self.tokens, self.target, self.bounds, self.splits
        typed = [array.dtype for array in (tokens, target, bounds)] == [np.int32, np.uint8, np.int64]
        shaped = tokens.ndim == target.ndim == bounds.ndim == 1 and len(tokens) == len(target) and len(bounds) > 1
        if not (typed and shaped and bounds[0] == 0 and bounds[-1] == len(tokens)):
            return False
        if splits is not None and (splits.dtype != np.int64 or splits.shape != (self.rows,)):
            return False
        return (
            all(self._rows_are_valid(here) for here in _blocks(self.rows, check))
            and all(
                bool(np.all(tokens[here] >= 0) and np.all(target[here] <= UNDESIRABLE))
                for here in _blocks(len(tokens), check)
            )
            and self._soft_targets_are_valid(check)
        )

    def _soft_targets_are_valid(self, check: Callable[[], None]) -> bool:
        candidates, weights = self.candidates, self.weights
        if candidates is None or weights is None:
            return candidates is None and weights is None
        if candidates.dtype != np.int32 or weights.dtype != np.float32 or candidates.shape != weights.shape:
            return False
        columns, left = divmod(candidates.size, max(1, self.target_tokens))
        firsts = candidates[:: max(1, columns)]
        return (
            left == 0
            and all(
                bool(np.all(candidates[here] >= REST) and np.all((weights[here] >= 0) & np.isfinite(weights[here])))
                for here in _blocks(candidates.size, check)
            )
            and all(bool(np.all(firsts[here] >= 0)) for here in _blocks(len(firsts), check))
        )

    def _rows_are_valid(self, rows: slice) -> bool:
        bounds, target = self.bounds[rows.start : rows.stop + 1], self.target
        if not np.all(np.diff(bounds) > 0) or bounds[0] < 0 or bounds[-1] > len(target) or target[bounds[:-1]].any():
            return False
        if self.splits is None:
            return True
        splits = self.splits[rows]
        inside = bool(np.all((bounds[:-1] < splits) & (splits < bounds[1:])))
        return inside and not target[splits].any()


def _blocks(size: int, check: Callable[[], None]) -> Iterator[slice]:
    for start in range(0, size, BLOCK):
        check()
        yield slice(start, min(start + BLOCK, size))


DTYPES: dict[str, type[np.number[Any]]] = {"I32": np.int32, "U8": np.uint8, "I64": np.int64, "F32": np.float32}
MAX_HEADER = 1 << 16
READ_AT_ONCE = 1 << 20
"""Bytes read at once."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int]
    data_offsets: tuple[int, int]


def map_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Map a file's one-dimensional arrays, read-only, each in its stored dtype (int32, uint8, int64 or fp32).

    Raises `OSError`; `ValueError` for a file that is truncated or has no such arrays.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(MAX_HEADER, size - 8):
            raise ValueError("no header")
        header = decoder_of(dict[str, _Entry]).decode(file.read(length))
        data = 8 + length
        if max((entry.data_offsets[1] for entry in header.values()), default=0) != size - data:
            raise ValueError("the file is not whole")
        return {name: _mapped(path, entry, data) for name, entry in header.items()}


def _mapped(path: Path, entry: _Entry, data: int) -> npt.NDArray[Any]:
    dtype, (start, stop), (count,) = DTYPES.get(entry.dtype), entry.data_offsets, entry.shape
    if dtype is None or start < 0 or count < 1 or stop - start != count * np.dtype(dtype).itemsize:
        raise ValueError("an array's size is wrong")
    return np.asarray(np.memmap(path, dtype, "r", data + start, (count,)))


def file_digest(path: Path, check: Callable[[], None] = unchecked) -> str:
    """Return a file's SHA-256, hex. `check` is called between reads and may raise. Raises `OSError`."""
    digest, block = hashlib.sha256(), bytearray(READ_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            check()
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()
