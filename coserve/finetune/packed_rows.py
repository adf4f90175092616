"""Rows of one or several jobs, packed into one sequence of tokens on the base's device.

Letters: T packed tokens, K kept tokens (those whose next token is a target), J jobs, Q sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coserve.data.corpus.tokenized import Corpus

ALIGNED = 16
"""Alignment in int64 elements: 128 bytes."""


@dataclass(frozen=True)
class PackedRows:
    """A packed batch. Token t of `keep_K` predicts `labels_K`, both in token order. All tensors are int64. Sequence i
    is `bounds[i]:bounds[i + 1]`: a row, or half of a pair. The rows of each job are contiguous. Padding tokens, which
    belong to no job, form one last sequence."""

    tokens_T: Tensor  # noqa: N815
    positions_T: Tensor  # noqa: N815
    bounds: tuple[int, ...]
    keep_K: Tensor  # noqa: N815
    labels_K: Tensor  # noqa: N815
    jobs: tuple[tuple[int, int], ...] = ()
    """Tokens and targets of each job (J); empty: all rows belong to one job."""
    sequence_targets: tuple[int, ...] = ()
    """For pairs: targets of each sequence (Q). A pair's two sequences are adjacent."""
    sequences_T: Tensor | None = None  # noqa: N815
    """For pairs: the sequence index of each token."""

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    @property
    def targets(self) -> int:
        return self.keep_K.shape[0]

    @property
    def token_bounds(self) -> tuple[int, ...]:
        """Job j has tokens `token_bounds[j]:token_bounds[j + 1]`."""
        return (0, *accumulate(tokens for tokens, _ in self.jobs)) if self.jobs else (0, self.tokens)

    @property
    def segment_bounds(self) -> tuple[int, ...]:
        """`token_bounds`, with padding tokens added to the last job's segment. They get no gradient."""
        return (*self.token_bounds[:-1], self.tokens)

    @property
    def job_targets(self) -> tuple[int, ...]:
        """Number of targets of each job, in their order in `keep_K`."""
        return tuple(targets for _, targets in self.jobs) or (self.targets,)


def pack_rows(corpus: Corpus, rows: Sequence[int], device: torch.device) -> PackedRows:
    """Concatenate rows of the corpus, given by index; attention treats each as its own sequence."""
    return pack_jobs([(corpus, rows)], device)


def pack_jobs(jobs: Sequence[tuple[Corpus, Sequence[int]]], device: torch.device, tokens_in_all: int = 0) -> PackedRows:
    """Like `pack_rows`, for several jobs: each job's corpus and row indices. Padded to `tokens_in_all`."""
    own = [[part for row in rows for part in corpus.sequences(row)] for corpus, rows in jobs]
    parts = [part for job in own for part in job]
    sequences = np.repeat(np.arange(len(parts)), [len(part) for part, _ in parts])
    missing = max(0, tokens_in_all - len(sequences))
    positions = [np.arange(len(part)) for part, _ in parts]
    if missing:  # may exceed the model's positions, so all padding is at position 0
        parts.append((np.zeros(missing, np.int32), np.zeros(missing, np.bool_)))
        positions.append(np.zeros(missing, np.int64))
    tokens = np.concatenate([tokens for tokens, _ in parts]).astype(np.int64)
    targets = np.flatnonzero(np.concatenate([target for _, target in parts]))
    lengths = [len(part) for part, _ in parts]
    position = np.concatenate(positions)
    assert not (position[targets] == 0).any(), "a sequence's first token is never a target"
    paired = all(corpus.splits is not None for corpus, _ in jobs)
    arrays = [tokens, position, targets - 1, tokens[targets]]
    if paired:
        arrays.append(np.pad(sequences, (0, missing)))
    moved = _moved(arrays, device)
    return PackedRows(
        tokens_T=moved[0],
        positions_T=moved[1],
        bounds=(0, *np.cumsum(lengths).tolist()),
        keep_K=moved[2],
        labels_K=moved[3],
        jobs=tuple((sum(len(row) for row, _ in job), sum(int(target.sum()) for _, target in job)) for job in own),
        sequence_targets=tuple(int(target.sum()) for job in own for _, target in job) if paired else (),
        sequences_T=moved[4] if paired else None,
    )


def _moved(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy the arrays to the device at once. The host memory is pinned, so this does not wait for a GPU; torch keeps it
    until the copy has ended. Each array is aligned to `ALIGNED` elements, since Triton recompiles a kernel for
    unaligned tensors."""
    starts = [0, *accumulate(-(-len(array) // ALIGNED) * ALIGNED for array in arrays)]
    host = torch.zeros(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + len(array)] = torch.from_numpy(array)
    whole = host.to(device, non_blocking=True)
    return [whole[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]
