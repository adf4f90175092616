"""Rows of a corpus packed into one sequence of tokens, on the base's device.

Letters: T packed tokens, K kept tokens (those whose next token is a target).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coserve.corpus.tokenized import Corpus


@dataclass(frozen=True)
class PackedRows:
    """Token t of `keep_K` predicts `labels_K`. All tensors are int64; row i is `bounds[i]:bounds[i + 1]`."""

    tokens_T: Tensor  # noqa: N815
    positions_T: Tensor  # noqa: N815
    bounds: tuple[int, ...]
    keep_K: Tensor  # noqa: N815
    labels_K: Tensor  # noqa: N815

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    @property
    def targets(self) -> int:
        return self.keep_K.shape[0]


def pack_rows(corpus: Corpus, rows: Sequence[int], device: torch.device) -> PackedRows:
    """Concatenate rows of the corpus, by index; attention treats each as a sequence of its own."""
    parts = [corpus.row(row) for row in rows]
    tokens = np.concatenate([tokens for tokens, _ in parts]).astype(np.int64)
    targets = np.flatnonzero(np.concatenate([target for _, target in parts]))
    lengths = [len(part) for part, _ in parts]
    positions = np.concatenate([np.arange(length) for length in lengths])
    assert not (positions[targets] == 0).any(), "a row's first token is never a target"
    return PackedRows(
        tokens_T=torch.from_numpy(tokens).to(device),
        positions_T=torch.from_numpy(positions).to(device),
        bounds=(0, *np.cumsum(lengths).tolist()),
        keep_K=torch.from_numpy(targets - 1).to(device),
        labels_K=torch.from_numpy(tokens[targets]).to(device),
    )
