"""Choosing the next token: a function of a row's logits, its request's parameters, its seed and how many tokens are out.

Order, as in vLLM: logit bias and barred tokens, penalties, temperature, min-p, top-k, top-p. Log-probabilities are those
of the raw logits. Every operation treats its rows apart: a row's choice is the same alone and in any batch, and the same
where the host knows the earlier tokens (`choose`) and where only the device does (`DeviceSampler`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from coserve.generate.sampling.draws import SAID_ONCE, Logprobs, draw, fetch, likeliest, logprobs_of, penalise_
from coserve.kernels.sampling.constants import GREEDY_BELOW, NONE_LEFT, NOT_FINITE
from coserve.types import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1
ROWS = 64
"""Rows that are treated at once: copies of logits in fp32 are no larger."""


class Asks(Protocol):
    """What the choice of a token depends on besides the logits and what was said before."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def t(self) -> int:
        """Tokens of the output before this one."""

    @property
    def barred(self) -> Collection[int]:
        """Tokens that must not be chosen."""


@dataclass(frozen=True)
class Row:
    """What the choice depends on besides the logits."""

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    barred: Collection[int] = ()
    """Tokens that must not be chosen."""

    @property
    def t(self) -> int:
        return len(self.output)


@dataclass(frozen=True)
class Choice:
    token: int
    logprob: TokenLogprob | None
    """If the request asks for it."""


class NoToken(IntEnum):
    """Why no token could be chosen."""

    NOT_FINITE = NOT_FINITE
    """The model's logits are NaN or infinite."""
    NONE_LEFT = NONE_LEFT
    """The request's own bias, penalties and barred tokens leave none."""


@dataclass(frozen=True)
class Said:
    """What was said before, for the rows that have penalties, in their order: rows `slots` of a table (`penalise_`)."""

    table: Tensor
    slots: Sequence[int]


@dataclass(frozen=True)
class Chosen:
    tokens: Tensor
    """int64 (B); a `NoToken` where the logits are not finite or the request leaves no token to choose."""
    logprobs: Logprobs | None
    """Of the rows that ask for them, if any does."""
    likeliest: bool = False
    """All tokens are the likeliest of the raw logits."""

    def fetch(self) -> Chosen:
        """A copy on the host, which is filled in the background."""
        return Chosen(fetch(self.tokens), None if self.logprobs is None else self.logprobs.fetch(), self.likeliest)


def choose(logits_BV: Tensor, rows: Sequence[Row]) -> list[Choice | NoToken]:
    """The next token of each row, or why there is none."""
    found: list[Choice | NoToken] = []
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        logits = logits_BV[start : start + ROWS]
        found += choices(decide(logits, likeliest(logits), some, _said(some, logits)))
    return found


def _said(rows: Sequence[Row], logits_BV: Tensor) -> Said:
    """What was said in rows whose every token is known."""
    penalised = [row for row in rows if is_penalised(row.params)]
    table = torch.zeros(len(penalised), logits_BV.shape[1], dtype=torch.int32)
    for said_V, row in zip(table, penalised, strict=True):
        entries = said(row.params, row.prompt, row.output)
        said_V[torch.tensor(list(entries), dtype=torch.long)] = torch.tensor(list(entries.values()), dtype=torch.int32)
    return Said(table.to(logits_BV.device), range(len(penalised)))


def choices(chosen: Chosen) -> list[Choice | NoToken]:
    """Waits for the device, unless the tensors are on the host."""
    entries = {} if chosen.logprobs is None else chosen.logprobs.entries()
    tokens = chosen.tokens.tolist()
    return [NoToken(token) if token < 0 else Choice(token, entries.get(i)) for i, token in enumerate(tokens)]


def decide(logits_BV: Tensor, likeliest_B: Tensor, rows: Sequence[Asks], said: Said) -> Chosen:
    """Of at most `ROWS` rows; waits for nothing. `likeliest_B`: of these logits. Counts the tokens in `said`."""
    assert len(rows) <= ROWS, f"expected at most {ROWS} rows, got {len(rows)}"
    draws = any(row.params.temperature >= GREEDY_BELOW for row in rows)
    adjusts = any(is_adjusted(row) for row in rows)
    asked = tuple(i for i, row in enumerate(rows) if row.params.logprobs is not None)
    if not (draws or adjusts or asked):
        return Chosen(likeliest_B, None, likeliest=True)
    vocab = logits_BV.shape[1]
    sent = _send(rows, asked, said, vocab, logits_BV.device)
    logits, tokens = logits_BV, likeliest_B
    if adjusts:
        logits = _adjusted(logits_BV, sent, said)
        adjusted = likeliest(logits)
        adjusted = torch.where(adjusted < 0, NONE_LEFT, adjusted)
        tokens = torch.where(likeliest_B < 0, likeliest_B, adjusted)
    if draws:
        filters = any(is_filtered(row.params, vocab) for row in rows)
        tokens = draw(logits, tokens, sent.columns, filters=filters)
    if said.slots:
        places = sent.slots * vocab + tokens.index_select(0, sent.penalised).clamp_min(0)
        said.table.view(-1).index_add_(0, places, torch.full_like(places, SAID_ONCE, dtype=torch.int32))
    plain = not (draws or adjusts)
    if not asked:
        return Chosen(tokens, None, plain)
    counts = tuple(rows[i].params.logprobs or 0 for i in asked)
    raw, chosen = logits_BV, tokens
    if len(asked) < len(rows):
        raw, chosen = logits_BV.index_select(0, sent.asked), tokens.index_select(0, sent.asked)
    return Chosen(tokens, Logprobs(asked, counts, *logprobs_of(raw, chosen, max(counts))), plain)


@dataclass(frozen=True)
class _Sent:
    """What rows ask for, on the device. Places are in all logits of the batch side by side."""

    columns: Tensor
    """fp64 (B, 5): the `knobs`."""
    biased: Tensor
    """int64: places."""
    biases: Tensor
    """fp32: what is added there."""
    barred: Tensor
    """int64: places."""
    penalised: Tensor
    """int64 (P): rows."""
    slots: Tensor
    """int64 (P): `Said.slots`."""
    penalties: Tensor
    """fp32 (P, 3)."""
    asked: Tensor
    """int64 (A): rows."""


def _send(rows: Sequence[Asks], asked: Sequence[int], said: Said, vocab: int, device: torch.device) -> _Sent:
    """In two copies."""
    bias = {i * vocab + token: value for i, row in enumerate(rows) for token, value in row.params.logit_bias.items()}
    barred = [i * vocab + token for i, row in enumerate(rows) for token in row.barred]
    penalised = [i for i, row in enumerate(rows) if is_penalised(row.params)]
    biased, at_barred, at_penalised, slots, at_asked = send_ids(
        device, tuple(bias), barred, penalised, tuple(said.slots), asked
    )
    values = [value for row in rows for value in knobs(row.params, row.t)]
    values += bias.values()
    for params in (rows[i].params for i in penalised):
        values += (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    sizes = [5 * len(rows), len(bias), 3 * len(penalised)]
    columns, biases, penalties = torch.split(send(torch.tensor(values, dtype=torch.float64), device), sizes)
    return _Sent(
        columns=columns.view(-1, 5),
        biased=biased,
        biases=biases.float(),
        barred=at_barred,
        penalised=at_penalised,
        slots=slots,
        penalties=penalties.float().view(-1, 3),
        asked=at_asked,
    )


def _adjusted(logits_BV: Tensor, sent: _Sent, said: Said) -> Tensor:
    """fp32 logits with bias, without barred tokens, and with penalties."""
    logits = logits_BV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    flat = logits.view(-1)
    if len(sent.biased):
        flat.index_copy_(0, sent.biased, flat.index_select(0, sent.biased) + sent.biases)
    if len(sent.barred):
        flat.index_copy_(0, sent.barred, torch.full_like(sent.barred, -torch.inf, dtype=torch.float32))
    if len(sent.penalised):
        penalise_(logits, sent.penalised, said.table, sent.slots, sent.penalties)
    return logits


def said(params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> dict[int, int]:
    """Entries of the table that `penalise_` reads, as far as these parameters need them; all others are 0."""
    counts = {token: SAID_ONCE * times for token, times in Counter(output).items()}
    if params.repetition_penalty != 1.0:
        for token in set(prompt):
            counts[token] = counts.get(token, 0) + 1
    return counts


def is_penalised(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def is_adjusted(row: Asks) -> bool:
    """Whether its logits are not taken as they are."""
    return bool(row.params.logit_bias or row.barred or is_penalised(row.params))


def is_filtered(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab or params.top_p < 1.0


def knobs(params: SamplingParams, t: int) -> tuple[float, float, float, float, float]:
    """Temperature, min-p, top-k (infinite for none), top-p, and the uniform number of token `t`."""
    top_k = float(params.top_k) if params.top_k > 0 else math.inf
    return params.temperature, params.min_p, top_k, params.top_p, uniform(params.seed, t)


def send(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; waits for nothing."""
    if device.type == "cuda":
        host = host.pin_memory()  # from torch's own pool, which keeps it until the copy has ended
    return host.to(device, non_blocking=True)


def send_ids(device: torch.device, *columns: Sequence[int]) -> list[Tensor]:
    """int64 columns in one copy."""
    flat = torch.tensor([value for column in columns for value in column], dtype=torch.int64)
    return list(torch.split(send(flat, device), [len(column) for column in columns]))


def uniform(seed: int, t: int) -> float:
    """A number in [0, 1) for token `t` of a request: splitmix64 (Steele et al., OOPSLA '14) keyed by the seed."""
    return (_mix(_mix(seed & _MASK) + (t + 1) * 0x9E3779B97F4A7C15 & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
