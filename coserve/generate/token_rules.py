"""Tokens that a request may choose from, whatever its text: some of the vocabulary, and none that completes a bad word.

Letters: W words of a mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WORD = 32
"""Tokens per word of a mask."""
Words = npt.NDArray[np.uint32]
"""Bit i of the words (W) is token i: 1 if it may come next."""


def set_bits(words_W: Words, tokens: Sequence[int], *, allowed: bool) -> None:
    """Set the tokens' bits in place to whether they are `allowed`."""
    ids = np.array(tokens, np.int64)
    bits = np.left_shift(np.uint32(1), (ids % WORD).astype(np.uint32))
    if allowed:
        np.bitwise_or.at(words_W, ids // WORD, bits)
    else:
        np.bitwise_and.at(words_W, ids // WORD, ~bits)


class TokenRules:
    """Rules of one request, whose output they follow: a step costs a look at its last token only."""

    def __init__(self, allowed: Sequence[int] | None, bad_words: Sequence[tuple[int, ...]], words: int) -> None:
        """`allowed`: token ids; None: all. `bad_words`: token sequences that the output must not have."""
        self._may_W = np.full(words, 0 if allowed is not None else ~np.uint32(0), np.uint32)
        set_bits(self._may_W, allowed or (), allowed=True)
        set_bits(self._may_W, [word[0] for word in bad_words if len(word) == 1], allowed=False)
        self._ends: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        """By its last token but one: a bad word's beginning, and its last token."""
        for *start, last in bad_words:
            if start:
                self._ends[start[-1]].append((start, last))
        self._output: list[int] = []

    def accept(self, token: int) -> None:
        """Take a sampled token."""
        self._output.append(token)

    def apply(self, words_W: Words) -> None:
        """Clear the bits of the tokens that must not come next."""
        words_W &= self._may_W
        ends = self._ends.get(self._output[-1], ()) if self._output else ()
        set_bits(words_W, [last for start, last in ends if self._output[-len(start) :] == start], allowed=False)
