"""Masks of a step's rows: which tokens may come next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.generate.sampling.draws import mask_
from coserve.generate.sampling.rows import SamplingRow
from coserve.generate.sampling.transfer import send, send_ids


@dataclass(frozen=True)
class Masks:
    """Masks of rows with a constraint; a row without one may choose any token."""

    rows: Mapping[int, int]
    """By a sequence's number: its row of `words`."""
    words: Tensor
    """int32 (R, W) on the host, for `draws.mask_`. Its memory holds the next step's masks once these are applied."""

    @classmethod
    def of(cls, rows: Mapping[int, int], words: bytes) -> Masks:
        """Return the masks whose words were sent as bytes."""
        if not rows:
            return NO_MASKS
        return cls(rows, torch.frombuffer(bytearray(words), dtype=torch.int32).view(len(rows), -1))

    def apply(self, rows: Sequence[SamplingRow], logits_BV: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place. Call it last: nothing after it can allow one again."""
        found = [(i, self.rows[row.sequence]) for i, row in enumerate(rows) if row.masked and row.sequence in self.rows]
        if not found:
            return
        places, own = zip(*found, strict=True)
        first, end = min(own), max(own) + 1
        at, which = send_ids(logits_BV.device, places, [row - first for row in own])
        words = send(self.words[first:end], logits_BV.device)
        in_order = own == tuple(range(first, end))
        mask_(logits_BV, at, words if in_order else words.index_select(0, which))


NO_MASKS = Masks({}, torch.empty(0, 0, dtype=torch.int32))
