"""Sampling of the next token: a function of a row's logits, its request's parameters, its seed and the earlier tokens.

Order, as in vLLM but for the mask: logit bias and banned tokens, penalties, the grammar's mask, temperature, min-p,
top-k, top-p. Log-probabilities are those of the raw logits. Rows are independent: a choice does not depend on the
batch, nor on whether the host knows the earlier tokens (`choose`) or only the device does (`DeviceSampler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coserve.generate.sampling.choices import Choice, Chosen, NoToken, choices
from coserve.generate.sampling.draws import OUTPUT_COUNT, draw, likeliest, penalise_
from coserve.generate.sampling.logprobs import Logprobs, logprobs_of
from coserve.generate.sampling.masks import NO_MASKS, Masks
from coserve.generate.sampling.rows import (
    SamplingRow,
    is_adjusted,
    is_filtered,
    is_penalised,
    parameters,
    token_counts,
)
from coserve.generate.sampling.transfer import send, send_ids
from coserve.kernels.sampling.constants import GREEDY_BELOW, NONE_LEFT

ROWS = 64
"""Rows processed at once, which bounds the fp32 copies of logits."""


@dataclass(frozen=True)
class TokenCounts:
    """Counts of earlier tokens for the rows with penalties, in their order: rows `slots` of `table` (see
    `penalise_`)."""

    table: Tensor
    slots: Sequence[int]


def choose(
    logits_BV: Tensor, rows: Sequence[SamplingRow], batch: int = ROWS, masks: Masks = NO_MASKS
) -> list[Choice | NoToken]:
    """Sample the next token of each row, or say why there is none. The rows must hold all earlier tokens."""
    found: list[Choice | NoToken] = []
    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        logits = logits_BV[start : start + batch]
        found += choices(decide(logits, likeliest(logits), some, _counts(some, logits), masks))
    return found


def _counts(rows: Sequence[SamplingRow], logits_BV: Tensor) -> TokenCounts:
    """Build the counts of rows whose tokens are all known to the host."""
    penalised = [row for row in rows if is_penalised(row.params)]
    table = torch.zeros(len(penalised), logits_BV.shape[1], dtype=torch.int32)
    for counts_V, row in zip(table, penalised, strict=True):
        entries = token_counts(row)
        counts_V[torch.tensor(list(entries), dtype=torch.long)] = torch.tensor(
            list(entries.values()), dtype=torch.int32
        )
    return TokenCounts(table.to(logits_BV.device), range(len(penalised)))


def decide(
    logits_BV: Tensor,
    likeliest_B: Tensor,
    rows: Sequence[SamplingRow],
    counts: TokenCounts,
    masks: Masks = NO_MASKS,
) -> Chosen:
    """Sample at most `ROWS` rows without waiting. `likeliest_B`: argmax of these logits. Adds the tokens to
    `counts`."""
    assert len(rows) <= ROWS, f"expected at most {ROWS} rows, got {len(rows)}"
    draws = any(row.params.temperature >= GREEDY_BELOW for row in rows)
    adjusts = any(is_adjusted(row) for row in rows)
    asked = tuple(i for i, row in enumerate(rows) if row.params.logprobs is not None)
    if not (draws or adjusts or asked):
        return Chosen(likeliest_B, None, likeliest=True)
    vocab = logits_BV.shape[1]
    sent = _send(rows, asked, counts, vocab, logits_BV.device)
    logits, tokens = logits_BV, likeliest_B
    if adjusts:
        logits = _adjusted(logits_BV, sent, counts)
        masks.apply(rows, logits)
        adjusted = likeliest(logits)
        adjusted = torch.where(adjusted < 0, NONE_LEFT, adjusted)
        tokens = torch.where(likeliest_B < 0, likeliest_B, adjusted)
    if draws:
        filters = any(is_filtered(row.params, vocab) for row in rows)
        tokens = draw(logits, tokens, sent.columns, filters=filters)
    if counts.slots:
        places = sent.slots * vocab + tokens.index_select(0, sent.penalised).clamp_min(0)
        counts.table.view(-1).index_add_(0, places, torch.full_like(places, OUTPUT_COUNT, dtype=torch.int32))
    plain = not (draws or adjusts)
    if not asked:
        return Chosen(tokens, None, plain)
    tops = tuple(rows[i].params.logprobs or 0 for i in asked)
    raw, chosen = logits_BV, tokens
    if len(asked) < len(rows):
        raw, chosen = logits_BV.index_select(0, sent.asked), tokens.index_select(0, sent.asked)
    return Chosen(tokens, Logprobs(asked, tops, *logprobs_of(raw, chosen, max(tops))), plain)


@dataclass(frozen=True)
class _Sent:
    """The rows' sampling parameters on the device. Places are indices into the flattened logits of the batch."""

    columns: Tensor
    """fp64 (B, 5): see `parameters`."""
    biased: Tensor
    """int64: places with a logit bias."""
    biases: Tensor
    """fp32: the biases."""
    banned: Tensor
    """int64: places of banned tokens."""
    penalised: Tensor
    """int64 (P): rows with penalties."""
    slots: Tensor
    """int64 (P): `TokenCounts.slots`."""
    penalties: Tensor
    """fp32 (P, 3): repetition, presence, frequency."""
    asked: Tensor
    """int64 (A): rows that request log-probabilities."""


def _send(
    rows: Sequence[SamplingRow], asked: Sequence[int], counts: TokenCounts, vocab: int, device: torch.device
) -> _Sent:
    """Send the parameters in two copies."""
    bias = {i * vocab + token: value for i, row in enumerate(rows) for token, value in row.params.logit_bias.items()}
    banned = [i * vocab + token for i, row in enumerate(rows) for token in row.banned]
    penalised = [i for i, row in enumerate(rows) if is_penalised(row.params)]
    biased, at_banned, at_penalised, slots, at_asked = send_ids(
        device, tuple(bias), banned, penalised, tuple(counts.slots), asked
    )
    values = [*bias.values()]
    for params in (rows[i].params for i in penalised):
        values += (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    sizes = [5 * len(rows), len(bias), 3 * len(penalised)]
    host = torch.from_numpy(np.concatenate((parameters(rows).ravel(), values)))
    columns, biases, penalties = torch.split(send(host, device), sizes)
    return _Sent(
        columns=columns.view(-1, 5),
        biased=biased,
        biases=biases.float(),
        banned=at_banned,
        penalised=at_penalised,
        slots=slots,
        penalties=penalties.float().view(-1, 3),
        asked=at_asked,
    )


def _adjusted(logits_BV: Tensor, sent: _Sent, counts: TokenCounts) -> Tensor:
    """Return fp32 logits with biases, bans and penalties applied."""
    logits = logits_BV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    flat = logits.view(-1)
    if len(sent.biased):
        flat.index_copy_(0, sent.biased, flat.index_select(0, sent.biased) + sent.biases)
    if len(sent.banned):
        flat.index_copy_(0, sent.banned, torch.full_like(sent.banned, -torch.inf, dtype=torch.float32))
    if len(sent.penalised):
        penalise_(logits, sent.penalised, counts.table, sent.slots, sent.penalties)
    return logits
