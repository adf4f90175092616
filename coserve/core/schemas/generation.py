"""Requests and responses of generation."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from coserve.core.limits import (
    MAX_MESSAGES,
    CacheSalt,
    Choices,
    LogitBias,
    LogprobCount,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seconds,
    Seed,
    StopText,
    StopTexts,
    StopTokenIds,
    Temperature,
    Text,
    TokenCount,
    TokenIds,
    TopK,
    TopP,
)
from coserve.core.messages import ChatMessage, TemplateOptions, Tools
from coserve.core.names import AdapterRefText
from coserve.core.types import SloClass, Wire


class GenerateRequest(Wire, frozen=True, omit_defaults=True):
    """`POST /generate`. Exactly one of `prompt` (text or token ids) and `messages`."""

    prompt: Text | TokenIds | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None
    """Of `messages`: JSON schemas for the base's chat template. A call that the model writes is part of its text."""
    chat_template_kwargs: TemplateOptions | None = None
    """Of `messages`: variables that the base's chat template reads, such as Qwen3's `enable_thinking`."""
    adapter: AdapterRefText | None = None
    """None: the base itself."""
    stream: bool = False
    n: Choices = 1
    """Choices to generate; choice i uses `seed + i`."""
    max_tokens: TokenCount | None = 128
    """At most the base's context; generation ends where the context does. None: as many as fit; 0, with
    `prompt_logprobs`: nothing is generated."""
    min_tokens: TokenCount = 0
    temperature: Temperature = 1.0
    """0: always the likeliest token."""
    top_k: TopK = 0
    """0: off."""
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: StopText | StopTexts | None = None
    """Texts that end the choice. They are not part of its text."""
    include_stop_str_in_output: bool = False
    """The stop string is part of the text."""
    stop_token_ids: StopTokenIds = []
    ignore_eos: bool = False
    logit_bias: LogitBias = {}
    logprobs: LogprobCount | None = None
    """Log-probability of each token and of so many likeliest ones; None: none."""
    prompt_logprobs: LogprobCount | None = None
    """The same for the prompt's tokens."""
    return_prompt_ids: bool = False
    add_special_tokens: bool = True
    """A text gets the tokens that the base expects before it, such as BOS. False: for a prompt that has them already,
    as a rendered chat has."""
    skip_special_tokens: bool = True
    """Special tokens are not part of the text."""
    seed: Seed | None = None
    """None: a random one, which the response repeats."""
    cache_salt: CacheSalt = ""
    """Only requests with the same salt share prefixes in the cache."""
    slo_class: SloClass | None = None
    """Targets that the daemon's settings give to the class; None: those of `interactive`."""
    slo_ttft: Seconds | None = None
    slo_tpot: Seconds | None = None
    slo_e2e: Seconds | None = None


class Logprob(Wire, frozen=True):
    r"""A token, its own text (of a part of a character its bytes, `bytes:\xf0\x9f`), and its natural-log
    probability."""

    token_id: int
    token: str
    logprob: float


class ChosenLogprob(Wire, frozen=True):
    """The chosen token and the likeliest ones in its place. `text`: what it adds to the choice's text, all of a
    character with its last part."""

    token_id: int
    token: str
    text: str
    logprob: float
    top: list[Logprob] = []


class PromptLogprob(Wire, frozen=True):
    """A token of the prompt, as a chosen one; `logprob` is null for the first one, which follows nothing."""

    token_id: int
    token: str
    text: str
    logprob: float | None
    top: list[Logprob] = []


Finish = Literal["stop", "length", "cancelled"]
"""Values of `FinishReason`."""


class Choice(Wire, frozen=True):
    """One continuation. `stop_reason` is the stop text or the stop token id that ended it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Finish
    stop_reason: str | int | None = None
    logprobs: list[ChosenLogprob] | None = None


class Usage(Wire, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timing(Wire, frozen=True):
    """Seconds from the request's arrival: until it was admitted, until its first token, until its end."""

    queue: float | None
    ttft: float
    e2e: float


class GenerateResponse(Wire, frozen=True):
    """The response of `POST /generate` without `stream`. `adapter` and `version` are null for the base."""

    id: str
    adapter: str | None
    version: int | None
    seed: int
    choices: list[Choice]
    usage: Usage
    timing: Timing
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[PromptLogprob] | None = None


class GenerateChunk(Wire, frozen=True):
    """One event of a stream: the new text and tokens of choice `index`.

    The last chunk of a choice has `finish_reason`; the last chunk of all has `usage` and `timing` too. Prompt ids
    and prompt log-probabilities come with the first chunks of choice 0, before its first token.
    """

    id: str
    adapter: str | None
    version: int | None
    seed: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    logprobs: list[ChosenLogprob] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    usage: Usage | None = None
    timing: Timing | None = None
