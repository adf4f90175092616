"""Sampling parameters: one declaration for the HTTP API, OpenAI's dialect, the SDK, the commands and the engine."""

from __future__ import annotations

from typing import Annotated, TypedDict

import msgspec
from msgspec import Meta

from coserve.core.limits import MAX_LOGIT_BIAS, Penalty, RepetitionPenalty, Temperature, TokenCount, TokenId, TopK, TopP


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens: parameters that mean the same in a request and in the engine. Each is also in
    `SamplingOptions`."""

    min_tokens: TokenCount = 0
    """Tokens per choice before it may end."""
    temperature: Temperature = 1.0
    """0: greedy."""
    top_k: TopK = 0
    """Sample from this many of the most likely tokens. 0: off."""
    top_p: TopP = 1.0
    """Sample from the most likely tokens with this total probability."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Minimum probability of a token, relative to the most likely one's."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divides positive logits of tokens in the prompt or output, and multiplies negative ones."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit once for each time it is in the output."""
    ignore_eos: bool = False
    """Generate past the base's end tokens."""
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)] = {}
    """Added to the logits of these token ids."""


class SamplingParams(SamplingFields, frozen=True, kw_only=True):
    """How to sample tokens. `seed` is always set when the engine gets it.

    Stop strings are handled in the API process, which has the text; the engine knows only `stop_token_ids`.
    """

    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's tokens. With `max_tokens` 0 the prompt is scored and nothing is generated."""
    seed: int = 0


class SamplingOptions(TypedDict, total=False):
    """`SamplingFields` as keyword arguments."""

    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    logit_bias: dict[int, float]
