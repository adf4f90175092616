"""Statistics of a tokenised corpus's rows, counted block by block, because a corpus may be larger than memory. No
torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from coserve.data.corpus.tokenized import Corpus

ROWS = 4096
"""Rows of a block."""


def count_beginning(corpus: Corpus, *tokens: int) -> int:
    """Count the rows that begin with these tokens."""
    count = 0
    for starts, found, _ in _blocks(corpus):
        long = starts[np.diff(starts, append=len(found)) >= len(tokens)]
        count += int(np.all([found[long + place] == token for place, token in enumerate(tokens)], axis=0).sum())
    return count


def count_without(corpus: Corpus, ends: Collection[int]) -> int:
    """Count the rows without a target token in `ends`."""
    count = 0
    for starts, found, learned in _blocks(corpus):
        taught = np.isin(found, list(ends)) & (learned == 1)
        count += int((np.add.reduceat(taught, starts, dtype=np.int64) == 0).sum())
    return count


def _blocks(corpus: Corpus) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8]]]:
    """Yield, for each block: where its rows begin (S), its tokens (N) and their target flags (N)."""
    for first in range(0, corpus.rows, ROWS):
        bounds = corpus.bounds[first : first + ROWS + 1]
        here = slice(bounds[0], bounds[-1])
        yield bounds[:-1] - bounds[0], corpus.tokens[here], corpus.target[here]
