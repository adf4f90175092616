"""The requests and answers of LoRAX and TGI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from coserve.schemas import MAX_STOPS, AdapterRefText, StopText
from coserve.types import Wire


class TgiParameters(Wire, frozen=True):
    """Of the fields after `return_full_text`, each must say what is the case anyway."""

    adapter_id: AdapterRefText | None = None
    """`name` or `name@version` of an adapter here; null: the base."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """null: 100."""
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    do_sample: bool | None = None
    """Without it, and without `temperature`, `top_k` and `top_p`, the likeliest token is taken."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    stop: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    """Texts that end the answer; they are part of it."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 62) - 1)] | None = None
    ignore_eos_token: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    """Log-probabilities of the prompt; not in streams."""
    return_full_text: bool | None = None

    adapter_source: Any = None
    api_token: Any = None
    merged_adapters: Any = None
    best_of: Any = None
    typical_p: Any = None
    truncate: Any = None
    watermark: Any = None
    top_n_tokens: Any = None
    return_k_alternatives: Any = None
    apply_chat_template: Any = None
    schema: Any = None
    response_format: Any = None
    grammar: Any = None


class TgiRequest(Wire, frozen=True):
    """`POST /generate` and `POST /generate_stream`, in LoRAX's and TGI's words."""

    inputs: str
    parameters: TgiParameters | None = None
    stream: bool | None = None


TgiFinish = Literal["length", "eos_token", "stop_sequence"]


class TgiPrefillToken(Wire, frozen=True):
    id: int
    text: str
    logprob: float | None


class TgiToken(Wire, frozen=True):
    id: int
    text: str
    logprob: float
    special: bool


class TgiDetails(Wire, frozen=True):
    finish_reason: TgiFinish
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    prefill: list[TgiPrefillToken] = []
    tokens: list[TgiToken] = []


class TgiResponse(Wire, frozen=True):
    generated_text: str
    details: TgiDetails | None = None


class TgiStreamDetails(Wire, frozen=True):
    finish_reason: TgiFinish
    prompt_tokens: int
    generated_tokens: int
    seed: int | None


class TgiStreamEvent(Wire, frozen=True):
    """A token; the last one has the whole text, and details if they were asked for."""

    index: int
    token: TgiToken
    generated_text: str | None = None
    details: TgiStreamDetails | None = None


class TgiError(Wire, frozen=True):
    error: str
    error_type: Literal["validation", "generation", "overloaded"]
