"""Schemas of generation requests and responses."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from coserve.core import limits
from coserve.core.messages import ChatMessage, TemplateOptions, Tools
from coserve.core.names import AdapterRefText
from coserve.core.sampling import SamplingFields
from coserve.core.schemas.output_format import ChoiceTexts, GrammarText, JsonSchema, ResponseFormat, StructuredOutputs
from coserve.core.types import SloClass, Wire


class GenerationFields(SamplingFields, frozen=True, kw_only=True, omit_defaults=True):
    """Fields with the same name and meaning here and in OpenAI's dialect."""

    n: limits.Choices = 1
    """Choices per prompt; choice i uses `seed + i`."""
    stream: bool = False
    stop: limits.StopText | limits.StopTexts | None = None
    """Strings that end the choice. They are not part of its text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    stop_token_ids: limits.StopTokenIds = []
    """Token ids that end the choice."""
    bad_words: limits.BadWords = []
    """Texts whose tokens, at the beginning of a word or within one, are not sampled one after another."""
    allowed_token_ids: limits.AllowedTokenIds | None = None
    """Only these tokens are sampled; the end of a sequence, only if it is among them."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    response_format: ResponseFormat | None = None
    """JSON that follows a schema, or any JSON object; at most one of this, `structured_outputs` and `guided_*`. The
    text ends where the grammar does. Names of schemas' keywords that cannot be enforced are in the error."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | GrammarText | None = None
    """Older name of `structured_outputs.json`."""
    guided_regex: GrammarText | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: GrammarText | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKENS)] | None = None
    """A longer prompt is cut to this many of its last tokens, behind the special tokens that come before a text.
    -1: as many as leave room for `max_tokens`. Not with `echo`."""
    cache_salt: limits.CacheSalt = ""
    """Only requests with the same salt share prefixes in the KV cache."""
    slo_class: SloClass | None = None
    """Class whose latency targets in the daemon's settings apply; None: `interactive`."""
    slo_ttft: limits.Seconds | None = None
    slo_tpot: limits.Seconds | None = None
    slo_e2e: limits.Seconds | None = None


class GenerateRequest(GenerationFields, frozen=True, omit_defaults=True):
    """Body of `POST /generate`. Exactly one of `prompt` (text or token ids) and `messages` is required."""

    prompt: limits.Text | limits.TokenIds | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=limits.MAX_MESSAGES)] | None = None
    tools: Tools | None = None
    """JSON schemas for the base's chat template, with `messages` only. A call that the model writes is part of its
    text."""
    chat_template_kwargs: TemplateOptions | None = None
    """Variables for the base's chat template, with `messages` only, such as Qwen3's `enable_thinking`."""
    add_generation_prompt: bool = True
    """With `messages`: False leaves out the beginning of an answer."""
    continue_final_message: bool = False
    """With `messages`: the answer continues the last message; only the new text is returned."""
    adapter: AdapterRefText | None = None
    """None: the base itself."""
    max_tokens: limits.TokenCount | None = 128
    """Maximum tokens per choice, at most the base's context. Generation also ends where the context does. None: as many
    as fit. 0: score the prompt only, with `prompt_logprobs`."""
    logprobs: limits.LogprobCount | None = None
    """Number of most likely tokens returned with each token's log-probability; None: no log-probabilities."""
    prompt_logprobs: limits.LogprobCount | None = None
    """Like `logprobs`, for the prompt's tokens."""
    return_prompt_ids: bool = False
    add_special_tokens: bool = True
    """Add the special tokens that the base expects at the beginning of a text, such as BOS. False: the prompt already
    has them, as a rendered chat does."""
    seed: limits.Seed | None = None
    """The same seed gives the same tokens. None: random; the response reports it."""


class Logprob(Wire, frozen=True):
    r"""A token, its own text (`bytes:\xf0\x9f` for an incomplete character), and its natural-log probability."""

    token_id: int
    token: str
    logprob: float


class ChosenLogprob(Wire, frozen=True):
    """The chosen token and the most likely alternatives. `text`: what the token adds to the choice's text; a character
    split over several tokens is added by the last of them."""

    token_id: int
    token: str
    text: str
    logprob: float
    top: list[Logprob] = []


class PromptLogprob(Wire, frozen=True):
    """A prompt token with its log-probability and alternatives; `logprob` is null for the first token."""

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


class CachedTokens(Wire, frozen=True):
    """Tokens of the prompt that were not computed: the prefix cache had them."""

    cached_tokens: int = 0


class Usage(Wire, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens = CachedTokens()


def token_usage(prompt: int, completion: int, cached: int) -> Usage:
    """Return the usage of `prompt` tokens, of which `cached` were not computed, and of `completion` tokens."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=CachedTokens(cached_tokens=cached),
    )


class Timing(Wire, frozen=True):
    """Seconds from the request's arrival to its admission, to its first token, and to its end."""

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
    (with `cached_tokens`, those of them that the prefix cache had) and prompt log-probabilities come with the first
    chunks of choice 0, before its first token.
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
    cached_tokens: int | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    usage: Usage | None = None
    timing: Timing | None = None
