"""The requests and responses of LoRAX and TGI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from coserve.api.http.body_types import Unsupported
from coserve.core import limits
from coserve.core.names import VERSIONED_NAME
from coserve.core.schemas.output_format import GrammarText, JsonSchema
from coserve.core.types import Wire

BASE_NAME = "__base_model__"
"""LoRAX's name for the base in `adapter_id`."""

AdapterId = Annotated[str, Meta(pattern=rf"\A(|{BASE_NAME}|{VERSIONED_NAME})\Z")]


class TgiGrammar(Wire, frozen=True):
    """TGI's `grammar`: a regular expression, a JSON schema as an object or as text, or an object with its `schema`."""

    type: Literal["regex", "json", "json_schema"]
    value: JsonSchema | GrammarText


class LoraxFormat(Wire, frozen=True):
    """LoRAX's `response_format`."""

    type: Literal["json_object"]
    schema: JsonSchema | GrammarText | None = None
    """null: any object."""


class TgiParameters(Wire, frozen=True):
    """Fields after `response_format` are not supported: only empty and default values are accepted."""

    adapter_id: AdapterId | None = None
    """`name` or `name@version` of an adapter here; null, empty or `__base_model__`: the base."""
    max_new_tokens: limits.PositiveTokenCount | None = None
    """null: 100."""
    temperature: limits.Temperature | None = None
    """0: always the likeliest token."""
    top_k: limits.TopK | None = None
    top_p: limits.TopP | None = None
    do_sample: bool | None = None
    """Without it, and without `temperature`, `top_k` and `top_p`, the likeliest token is taken."""
    repetition_penalty: limits.RepetitionPenalty | None = None
    frequency_penalty: limits.Penalty | None = None
    stop: limits.StopTexts | None = None
    """Texts that end the choice; they are part of its text."""
    seed: limits.Seed | None = None
    ignore_eos_token: bool | None = None
    best_of: limits.Choices | None = None
    """Number of choices to generate; the one with the largest mean log-probability is returned. Above 1 it needs
    sampling, no seed, no stream."""
    details: bool | None = None
    decoder_input_details: bool | None = None
    """Log-probabilities of the prompt, and `details`; not in streams."""
    top_n_tokens: limits.LogprobCount | None = None
    """TGI's: the likeliest tokens at each place, in `top_tokens`."""
    return_k_alternatives: limits.LogprobCount | None = None
    """LoRAX's: the likeliest tokens at each place, in each token's `alternative_tokens`."""
    return_full_text: bool | None = None
    """The prompt comes before the text."""
    truncate: limits.PositiveTokenCount | None = None
    """A longer prompt is cut to this many of its last tokens, behind the special tokens at its beginning."""
    grammar: TgiGrammar | None = None
    """Grammar that the text follows; not beside `response_format`."""
    response_format: LoraxFormat | None = None

    adapter_source: Annotated[Any, Unsupported(("local",))] = None
    api_token: Annotated[Any, Unsupported()] = None
    merged_adapters: Annotated[Any, Unsupported()] = None
    typical_p: Annotated[Any, Unsupported((1, 1.0))] = None
    watermark: Annotated[Any, Unsupported((False,))] = None
    apply_chat_template: Annotated[Any, Unsupported((False,))] = None
    schema: Annotated[Any, Unsupported()] = None


class TgiRequest(Wire, frozen=True):
    """`POST /`, `POST /generate` and `POST /generate_stream`, with the field names of LoRAX and TGI."""

    inputs: limits.Text
    parameters: TgiParameters | None = None
    stream: bool | None = None


TgiErrorType = Literal["validation", "generation", "overloaded"]
TgiFinish = Literal["length", "eos_token", "stop_sequence"]


class TgiPrefillToken(Wire, frozen=True):
    id: int
    text: str
    logprob: float | None


class TgiAlternative(Wire, frozen=True):
    id: int
    text: str
    logprob: float


class TgiToken(TgiAlternative, frozen=True):
    special: bool
    alternative_tokens: list[TgiAlternative] | UnsetType = UNSET
    """With `return_k_alternatives`."""


class TgiChoice(Wire, frozen=True, kw_only=True):
    finish_reason: TgiFinish
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPrefillToken] = []
    tokens: list[TgiToken] = []
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET
    """One list a token, with `top_n_tokens`."""


class TgiSequence(TgiChoice, frozen=True, kw_only=True):
    """One of the choices that `best_of` left out."""

    generated_text: str


class TgiDetails(TgiChoice, frozen=True, kw_only=True):
    prompt_tokens: int
    best_of_sequences: list[TgiSequence] | UnsetType = UNSET


class TgiResponse(Wire, frozen=True):
    generated_text: str
    details: TgiDetails | None = None


class TgiStreamDetails(Wire, frozen=True):
    finish_reason: TgiFinish
    prompt_tokens: int
    input_length: int
    """Same as `prompt_tokens`; TGI's newer name."""
    generated_tokens: int
    seed: int | None


class TgiStreamEvent(Wire, frozen=True):
    """A token; the last one has the whole text, and details if they were asked for."""

    index: int
    token: TgiToken
    top_tokens: list[TgiToken] | UnsetType = UNSET
    generated_text: str | None = None
    details: TgiStreamDetails | None = None


class TgiError(Wire, frozen=True):
    error: str
    error_type: TgiErrorType


class TgiInfo(Wire, frozen=True):
    """`GET /info`. Lengths are tokens."""

    model_id: str
    model_sha: str
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: Literal["text-generation"]
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    router: Literal["coserve"]
    version: str
