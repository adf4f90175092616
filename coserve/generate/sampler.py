"""Choosing the next token: a function of a row's logits, its request's parameters, its seed and how many tokens are out.

Order, as in vLLM: logit bias and barred tokens, penalties, temperature, min-p, top-k, top-p. Log-probabilities are those
of the raw logits. Probabilities are fp64, and every operation treats its rows apart: a row's choice is the same alone
and in any batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coserve.types import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5
"""A temperature below this means the likeliest token."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Row:
    """What the choice depends on besides the logits."""

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    barred: Collection[int] = ()
    """Tokens that must not be chosen."""


@dataclass(frozen=True)
class Choice:
    token: int
    logprob: TokenLogprob | None
    """If the request asks for it."""


def choose(logits_BV: Tensor, rows: Sequence[Row]) -> list[Choice | None]:
    """The next token of each row; None where the logits are not finite or leave no token to choose."""
    raw = logits_BV.float()
    logits = raw.clone()
    for i, row in enumerate(rows):
        _adjust(logits[i], row)
    usable = (raw.amax(-1).isfinite() & logits.amax(-1).isfinite()).tolist()
    tokens = logits.argmax(-1)  # the first of equals
    sampled = [i for i, row in enumerate(rows) if usable[i] and row.params.temperature >= GREEDY_BELOW]
    sorts = [sorts_of(row.params, logits.shape[1]) for row in rows]
    for group in ([i for i in sampled if not sorts[i]], [i for i in sampled if sorts[i]]):
        if group:
            at = torch.tensor(group, device=logits.device)
            tokens[at] = _sample(logits[at], [rows[i] for i in group], sort=sorts[group[0]])
    chosen = tokens.tolist()
    asked = [i for i, row in enumerate(rows) if usable[i] and row.params.logprobs is not None]
    logprobs = _logprobs(raw, chosen, asked, rows)
    return [Choice(chosen[i], logprobs.get(i)) if usable[i] else None for i in range(len(rows))]


def _adjust(logits_V: Tensor, row: Row) -> None:
    """Bias, barred tokens and penalties, in place."""
    params, device = row.params, logits_V.device
    if params.logit_bias:
        at = torch.tensor(list(params.logit_bias), device=device)
        logits_V[at] += torch.tensor(list(params.logit_bias.values()), device=device)
    if row.barred:
        logits_V[torch.tensor(list(row.barred), device=device)] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list({*row.prompt, *row.output}), device=device, dtype=torch.long)
        value = logits_V[seen]
        logits_V[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    if row.output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(row.output)
        at = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), device=device, dtype=logits_V.dtype)
        logits_V[at] -= params.frequency_penalty * times + params.presence_penalty


def sorts_of(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab or params.top_p < 1.0


def _sample(logits_BV: Tensor, rows: Sequence[Row], *, sort: bool) -> Tensor:
    """(B) tokens by inverting the distribution function at each row's own uniform number."""
    columns = torch.tensor(
        [knobs(row.params, len(row.output)) for row in rows], dtype=torch.float64, device=logits_BV.device
    )
    return sample(logits_BV, columns, sort=sort)


NOT_FINITE = -1
"""In place of a token: the logits were not finite."""
_CHUNK = 256


def likeliest(logits_BV: Tensor) -> Tensor:
    """(B) the first token of the highest logit; `NOT_FINITE` where a row has no finite maximum. Waits for nothing."""
    rows, vocab = logits_BV.shape
    if vocab % _CHUNK:
        value, token = logits_BV.max(-1)
    else:  # in two steps: a GPU leaves one long row to a few of its multiprocessors
        values, places = logits_BV.view(rows, -1, _CHUNK).max(-1)
        value, chunk = values.max(-1)
        token = chunk * _CHUNK + places.gather(1, chunk[:, None])[:, 0]
    return torch.where(value.isfinite(), token, NOT_FINITE)


def knobs(params: SamplingParams, t: int) -> tuple[float, float, float, float, float]:
    """Temperature, min-p, top-k (infinite for none), top-p, and the uniform number of token `t`."""
    top_k = float(params.top_k) if params.top_k > 0 else math.inf
    return params.temperature, params.min_p, top_k, params.top_p, uniform(params.seed, t)


def sample(logits_BV: Tensor, columns_BK: Tensor, *, sort: bool) -> Tensor:
    """(B) tokens; `columns_BK`: the rows' `knobs`, fp64; `sort`: whether any row has a top-k or top-p."""
    temperature, min_p, top_k, top_p, number = torch.split(columns_BK, 1, dim=1)
    probs = (logits_BV.double() / temperature).softmax(-1)
    low = min_p * probs.amax(-1, keepdim=True)
    probs = probs.masked_fill(probs < low, 0.0)
    order: Tensor | None = None
    if sort:
        probs, order = probs.sort(stable=True, dim=-1, descending=True)
        probs = probs.masked_fill(torch.arange(probs.shape[1], device=probs.device) >= top_k, 0.0)
        mass = probs.cumsum(-1)
        outside = mass - probs >= top_p * mass[:, -1:]
        outside[:, 0] = False
        probs = probs.masked_fill(outside, 0.0)
    mass = probs.cumsum(-1)
    total = mass[:, -1:]
    # Below the total, so that the first place above the goal exists and has a probability of its own.
    goal = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(mass, goal, right=True)
    return (place if order is None else order.gather(1, place))[:, 0]


def _logprobs(
    raw_BV: Tensor, chosen: Sequence[int], asked: Sequence[int], rows: Sequence[Row]
) -> dict[int, TokenLogprob]:
    """Log-probabilities of the raw logits for the rows `asked`."""
    found: dict[int, TokenLogprob] = {}
    if not asked:
        return found
    logprobs = raw_BV[torch.tensor(asked, device=raw_BV.device)].log_softmax(-1)
    most = min(max(rows[i].params.logprobs or 0 for i in asked), raw_BV.shape[1])
    values, ids = (part.tolist() for part in logprobs.sort(stable=True, dim=-1, descending=True)) if most else ([], [])
    for place, i in enumerate(asked):
        n = rows[i].params.logprobs or 0
        top = tuple(zip(ids[place][:n], values[place][:n], strict=True)) if n else ()
        found[i] = TokenLogprob(logprobs[place, chosen[i]].item(), top)
    return found


def uniform(seed: int, t: int) -> float:
    """A number in [0, 1) for token `t` of a request: splitmix64 (Steele et al., OOPSLA '14) keyed by the seed."""
    return (_mix(_mix(seed & _MASK) + (t + 1) * 0x9E3779B97F4A7C15 & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
