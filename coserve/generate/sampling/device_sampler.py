"""Sampling one step ahead of the host: the device counts the tokens that it samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coserve.core.limits import MAX_LOGPROBS
from coserve.generate.sampling.choices import Chosen
from coserve.generate.sampling.draws import draw, likeliest, mask_, penalise_
from coserve.generate.sampling.logprobs import Logprobs, logprobs_of
from coserve.generate.sampling.masks import NO_MASKS, Masks
from coserve.generate.sampling.rows import SamplingRow, is_penalised, token_counts
from coserve.generate.sampling.sampler import ROWS, TokenCounts, decide
from coserve.generate.sampling.transfer import send, send_ids


class DeviceSampler:
    """Samples tokens of sequences whose newest tokens the host may not know yet. Never waits for the device."""

    def __init__(self, vocab: int, device: torch.device, batch: int = ROWS) -> None:
        """`batch`: rows processed at once."""
        self._device, self._batch, self._history = device, batch, History(vocab, device)

    @property
    def history_rows(self) -> int:
        """Allocated rows of the count table."""
        return self._history.rows

    def choose(
        self, logits_BV: Tensor, likeliest_B: Tensor, rows: Sequence[SamplingRow], masks: Masks = NO_MASKS
    ) -> Chosen:
        """Return the next tokens of `rows`. `likeliest_B`: argmax of these logits."""
        if not rows:
            return Chosen(likeliest_B, None)
        parts = []
        for start in range(0, len(rows), self._batch):
            part = slice(start, start + self._batch)
            counts = self._history.of([row for row in rows[part] if is_penalised(row.params)])
            parts.append(decide(logits_BV[part], likeliest_B[part], rows[part], counts, masks))
        return _joined(parts, self._batch)

    def forget(self, sequence: int) -> None:
        """Drop the counts of a sequence that has ended."""
        self._history.forget(sequence)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels for logits of this dtype, so that no request waits for it."""
        vocab = self._history.vocab
        columns = send(torch.tensor([[1.0, 0.0, 2.0, 0.5, 0.5]], dtype=torch.float64), self._device)
        at, table = torch.zeros(1, dtype=torch.int64, device=self._device), self._history.empty(1)
        for kind in dict.fromkeys((dtype, torch.float32)):
            logits = torch.zeros(1, vocab, dtype=kind, device=self._device)
            for filters in (False, True):
                draw(logits, likeliest(logits), columns, filters=filters)
            logprobs_of(logits, at, MAX_LOGPROBS)
        penalise_(torch.zeros(1, vocab, device=self._device), at, table, at, torch.ones(1, 3, device=self._device))
        words = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32, device=self._device)
        mask_(torch.zeros(1, vocab, device=self._device), at, words)


class History:
    """Token counts of each sequence with penalties, in rows of a table that grows (`draws.penalise_`)."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self._device = vocab, device
        self._table = self.empty(0)
        self._rows: dict[int, int] = {}
        self._counted: dict[int, int] = {}
        """Output tokens counted in the table for each sequence, including those in flight and the next one."""
        self._free: list[int] = []

    @property
    def rows(self) -> int:
        return len(self._table)

    def of(self, rows: Sequence[SamplingRow]) -> TokenCounts:
        """Return the sequences' rows of the table, up to date. The sampler counts their next tokens there itself."""
        stale = [row for row in rows if self._counted.get(row.sequence) != row.t]
        for row in stale:
            assert len(row.tokens) == row.prompt_tokens + row.t, "a token on the device was not counted there"
            if row.sequence not in self._rows:
                self._rows[row.sequence] = self._free.pop() if self._free else self._grow()
        if stale:
            self._write(stale)
        for row in rows:
            self._counted[row.sequence] = row.t + 1
        return TokenCounts(self._table, [self._rows[row.sequence] for row in rows])

    def forget(self, sequence: int) -> None:
        place = self._rows.pop(sequence, None)
        if place is not None:
            self._counted.pop(sequence, None)  # missing if memory ran out before it was counted
            self._free.append(place)

    def empty(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.vocab, dtype=torch.int32, device=self._device)

    def _grow(self) -> int:
        """Double the table; return one new row."""
        rows = len(self._table)
        table = self.empty(max(4, 2 * rows))
        table[:rows] = self._table
        self._table = table
        self._free.extend(range(rows + 1, len(table)))
        return rows

    def _write(self, stale: Sequence[SamplingRow]) -> None:
        places, values = list[int](), list[int]()
        for row in stale:
            entries = token_counts(row)
            places += [self._rows[row.sequence] * self.vocab + token for token in entries]
            values += entries.values()
        rows, at, counts = send_ids(self._device, [self._rows[row.sequence] for row in stale], places, values)
        self._table.index_fill_(0, rows, 0)
        self._table.view(-1).index_copy_(0, at, counts.int())


def _joined(parts: Sequence[Chosen], batch: int) -> Chosen:
    """Concatenate the results of successive batches."""
    if len(parts) == 1:
        return parts[0]
    tokens = torch.cat([part.tokens for part in parts])
    plain = all(part.likeliest for part in parts)
    asked = [(i * batch, part.logprobs) for i, part in enumerate(parts) if part.logprobs is not None]
    if not asked:
        return Chosen(tokens, None, plain)
    n = max(part.ids.shape[1] for _, part in asked)
    return Chosen(
        tokens,
        Logprobs(
            tuple(start + row for start, part in asked for row in part.rows),
            tuple(count for _, part in asked for count in part.counts),
            torch.cat([_widened(part.values, 1 + n) for _, part in asked]),
            torch.cat([_widened(part.ids, n) for _, part in asked]),
        ),
        plain,
    )


def _widened(tensor_AN: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor_AN, (0, width - tensor_AN.shape[1]))
