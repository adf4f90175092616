"""Sampling one step ahead of what the host has read: the device counts the tokens that it chooses itself."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.generate.sampling.draws import Logprobs, draw, likeliest, logprobs_of, penalise_
from coserve.generate.sampling.sampler import ROWS, Chosen, Said, decide, is_penalised, said, send, send_ids
from coserve.generate.sequences import Sequence
from coserve.types import SamplingParams

MOST_LOGPROBS = 20


@dataclass(frozen=True)
class _Next:
    """The next token of a sequence (`sampler.Asks`)."""

    params: SamplingParams
    t: int
    barred: Collection[int]


class DeviceSampler:
    """Chooses tokens of sequences whose newest ones the host may not know yet. Waits for nothing."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._device, self._history = device, History(vocab, device)

    def choose(self, logits_BV: Tensor, likeliest_B: Tensor, ready: Items[Sequence]) -> Chosen:
        """The next tokens of `ready`; `likeliest_B` is of these logits."""
        rows = [_Next(s.sampling, s.generated + s.flying, s.barred()) for s in ready]
        if not rows:
            return Chosen(likeliest_B, None)
        parts = []
        for start in range(0, len(rows), ROWS):
            part = slice(start, start + ROWS)
            before = self._history.of([s for s in ready[part] if is_penalised(s.sampling)])
            parts.append(decide(logits_BV[part], likeliest_B[part], rows[part], before))
        return _joined(parts)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._history.forget(sequence)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles the kernels for logits of this type, so that no request waits for that."""
        vocab = self._history.vocab
        columns = send(torch.tensor([[1.0, 0.0, 2.0, 0.5, 0.5]], dtype=torch.float64), self._device)
        at, table = torch.zeros(1, dtype=torch.int64, device=self._device), self._history.empty(1)
        for kind in dict.fromkeys((dtype, torch.float32)):
            logits = torch.zeros(1, vocab, dtype=kind, device=self._device)
            for filters in (False, True):
                draw(logits, likeliest(logits), columns, filters=filters)
            logprobs_of(logits, at, MOST_LOGPROBS)
        penalise_(torch.zeros(1, vocab, device=self._device), at, table, at, torch.ones(1, 3, device=self._device))


class History:
    """What was said in each sequence that has penalties, in rows of a table that grows (`draws.penalise_`)."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self._device = vocab, device
        self._table = self.empty(0)
        self._rows: dict[Sequence, int] = {}
        self._counted: dict[Sequence, int] = {}
        """Tokens of the output that are in the table, with those that the host does not know, and the next one."""
        self._free: list[int] = []

    def of(self, sequences: Items[Sequence]) -> Said:
        """Their rows, for their next token, which will be counted there."""
        stale = [s for s in sequences if self._counted.get(s) != s.generated + s.flying]
        for sequence in stale:
            assert not sequence.flying, "a token on the device was not counted there"
            if sequence not in self._rows:
                self._rows[sequence] = self._free.pop() if self._free else self._grow()
        if stale:
            self._write(stale)
        for sequence in sequences:
            self._counted[sequence] = sequence.generated + sequence.flying + 1
        return Said(self._table, [self._rows[sequence] for sequence in sequences])

    def forget(self, sequence: Sequence) -> None:
        row = self._rows.pop(sequence, None)
        if row is not None:
            del self._counted[sequence]
            self._free.append(row)

    def empty(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.vocab, dtype=torch.int32, device=self._device)

    def _grow(self) -> int:
        """Twice as many rows; one of them."""
        rows = len(self._table)
        table = self.empty(max(4, 2 * rows))
        table[:rows] = self._table
        self._table = table
        self._free.extend(range(rows + 1, len(table)))
        return rows

    def _write(self, sequences: Items[Sequence]) -> None:
        places, values = list[int](), list[int]()
        for sequence in sequences:
            entries = said(sequence.sampling, sequence.request.prompt, sequence.output)
            places += [self._rows[sequence] * self.vocab + token for token in entries]
            values += entries.values()
        rows, at, what = send_ids(self._device, [self._rows[sequence] for sequence in sequences], places, values)
        self._table.index_fill_(0, rows, 0)
        self._table.view(-1).index_copy_(0, at, what.int())


def _joined(parts: Items[Chosen]) -> Chosen:
    """Of batches one after another."""
    if len(parts) == 1:
        return parts[0]
    tokens = torch.cat([part.tokens for part in parts])
    plain = all(part.likeliest for part in parts)
    asked = [(i * ROWS, part.logprobs) for i, part in enumerate(parts) if part.logprobs is not None]
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
