"""Inputs of sampling besides the logits, as plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from coserve.core.sampling import SamplingParams
from coserve.generate.sampling.draws import OUTPUT_COUNT, PROMPT_COUNT
from coserve.kernels.sampling.constants import GREEDY_BELOW

_MASK, _STEP = (1 << 64) - 1, np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))


class SamplingRow(Struct, frozen=True, array_like=True):
    """One sequence whose next token is sampled."""

    sequence: int
    """The request's number, which is never reused."""
    params: SamplingParams
    t: int
    """Output tokens before this one."""
    banned: frozenset[int] = frozenset()
    """Tokens that must not be sampled."""
    tokens: Sequence[int] = ()
    """Prompt and output tokens known to the host. Empty unless a penalty needs them."""
    prompt_tokens: int = 0
    """Length of the prompt in `tokens`."""
    masked: bool = False
    """Whether a mask of a grammar or of token rules is applied. It is given after the launch: see
    `StepExecutor.choose`."""


def is_penalised(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def is_adjusted(row: SamplingRow) -> bool:
    """Whether bias, bans, penalties or a mask change its logits."""
    return bool(row.params.logit_bias or row.banned or row.masked or is_penalised(row.params))


def is_likeliest(row: SamplingRow) -> bool:
    """Whether only the argmax of its raw logits is needed."""
    return row.params.temperature < GREEDY_BELOW and row.params.logprobs is None and not is_adjusted(row)


def is_filtered(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab or params.top_p < 1.0


def parameters(rows: Sequence[SamplingRow]) -> NDArray[np.float64]:
    """(B, 5): temperature, min-p, top-k (infinite for none), top-p, and the uniform number of each row."""
    found = np.empty((len(rows), 5))
    found[:, :4] = [
        (params.temperature, params.min_p, params.top_k if params.top_k > 0 else math.inf, params.top_p)
        for params in (row.params for row in rows)
    ]
    found[:, 4] = uniform([row.params.seed for row in rows], [row.t for row in rows])
    return found


def token_counts(row: SamplingRow) -> dict[int, int]:
    """The row's nonzero entries of the table that `penalise_` reads, as far as its penalties need them."""
    counts = {token: OUTPUT_COUNT * times for token, times in Counter(row.tokens[row.prompt_tokens :]).items()}
    if row.params.repetition_penalty != 1.0:
        for token in set(row.tokens[: row.prompt_tokens]):
            counts[token] = counts.get(token, 0) + PROMPT_COUNT
    return counts


def uniform(seeds: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float64]:
    """(B): a uniform number in [0, 1) for token `tokens[i]` of a request with `seeds[i]`: splitmix64 (Steele et al.,
    OOPSLA '14) keyed by the seed."""
    keys = _mix(np.array([seed & _MASK for seed in seeds], np.uint64))
    mixed = _mix(keys + (np.array(tokens, np.uint64) + np.uint64(1)) * _STEP)
    return (mixed >> np.uint64(11)) * np.float64(2.0**-53)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sums and products are modulo 2**64."""
    z = z + _STEP
    for shift, factor in _ROUNDS:
        z = (z ^ (z >> shift)) * factor
    return z ^ (z >> np.uint64(31))
