"""Sampling parameters: one declaration for the HTTP API, OpenAI's dialect, the SDK, the commands and the engine."""

from __future__ import annotations

from typing import Annotated, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from coserve.core.limits import MAX_LOGIT_BIAS, Penalty, RepetitionPenalty, Temperature, TokenCount, TokenId, TopK, TopP


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters for which a base may have defaults of its own, in its `generation_config.json`."""

    temperature: Temperature | None = None
    """0: greedy. None: the base's default, else 1."""
    top_k: TopK | None = None
    """Sample from this many of the most likely tokens. 0: off. None: the base's default, else 0."""
    top_p: TopP | None = None
    """Sample from the most likely tokens with this total probability. None: the base's default, else 1."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Minimum probability of a token, relative to the most likely one's. None: the base's default, else 0."""
    repetition_penalty: RepetitionPenalty | None = None
    """Divides positive logits of tokens in the prompt or output, and multiplies negative ones. None: the base's
    default, else 1."""

    def fill(self, request: Sampled) -> Sampled:
        """Return the request with these values for what it leaves out."""
        missing = [name for name in SamplingDefaults.__struct_fields__ if getattr(request, name) is None]
        return msgspec.structs.replace(request, **{name: getattr(self, name) for name in missing})


Sampled = TypeVar("Sampled", bound=SamplingDefaults)


class SamplingFields(SamplingDefaults, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens: parameters that mean the same in a request and in the engine. Each is also in
    `SamplingOptions`."""

    min_tokens: TokenCount = 0
    """Tokens per choice before it may end."""
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

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's tokens. With `max_tokens` 0 the prompt is scored and nothing is generated."""
    seed: int = 0


NEUTRAL = SamplingDefaults(**{name: getattr(SamplingParams(), name) for name in SamplingDefaults.__struct_fields__})
"""Defaults that change no probability."""


class SamplingOptions(TypedDict, total=False):
    """`SamplingFields` as keyword arguments."""

    min_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    logit_bias: dict[int, float]
