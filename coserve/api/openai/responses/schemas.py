"""Bodies and events of `/v1/responses`, as far as OpenAI's clients read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from coserve.api.http.body_types import Unsupported
from coserve.api.openai.lists import ListPage
from coserve.api.openai.schemas import ChatLogprob, ModelName, OpenAIErrorInfo, ServiceTier
from coserve.core import limits
from coserve.core.messages import TemplateOptions, Tools
from coserve.core.sampling import SamplingFields
from coserve.core.schemas.generation import CachedTokens
from coserve.core.schemas.output_format import JsonSchema, StructuredOutputs
from coserve.core.types import SloClass, Wire

Role = Literal["system", "developer", "user", "assistant"]
Truncation = Literal["auto", "disabled"]
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""


class InputItem(Wire, frozen=True, omit_defaults=True):
    """One item of `input`: a message, a call or its output, reasoning, or a compaction, whose `encrypted_content` is a
    summary in plain text; OpenAI's field names. Items of answers can be
    sent back as they came, or, while they are stored, as an `item_reference` with their `id`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "compaction", "item_reference"] = (
        "message"
    )
    role: Role | None = None
    content: limits.Text | Annotated[list[dict[str, Any]], Meta(max_length=limits.MAX_PARTS)] | None = None
    """A text, or parts of type `input_text`, `output_text` or `text`, of reasoning `reasoning_text`."""
    call_id: limits.Text | None = None
    name: limits.Text | None = None
    arguments: limits.Text | None = None
    output: limits.Text | Annotated[list[dict[str, Any]], Meta(max_length=limits.MAX_PARTS)] | None = None
    id: Any = None
    status: Any = None
    summary: Any = None
    encrypted_content: Any = None


class StoredItem(InputItem, frozen=True, kw_only=True, omit_defaults=True):
    """One item of a stored response."""

    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning", "compaction"]


class TextFormat(Wire, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: limits.Text = ""
    schema: JsonSchema | None = None
    description: limits.Text | None = None
    strict: bool | None = None


class TextOptions(Wire, frozen=True):
    format: TextFormat | None = None
    verbosity: Any = None


class ResponseRequest(SamplingFields, frozen=True, kw_only=True):
    """`POST /v1/responses`."""

    input: limits.Text | Annotated[list[InputItem], Meta(max_length=limits.MAX_MESSAGES)]
    model: ModelName | None = None
    instructions: limits.Text | None = None
    """A system message before `input`."""
    max_output_tokens: limits.PositiveTokenCount | None = None
    """null: as many as fit."""
    stream: bool = False
    tools: Tools | None = None
    """Functions: objects with `type`, `name` and `parameters` at the same level."""
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    """`format`: JSON that follows a schema, or any JSON object."""
    include: Annotated[list[limits.Text], Meta(max_length=64)] | None = None
    """`message.output_text.logprobs`; others are ignored."""
    top_logprobs: limits.LogprobCount | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    """Variables that the base's chat template reads, such as Qwen3's `enable_thinking`."""
    structured_outputs: StructuredOutputs | None = None
    """As in chats, instead of `text.format`."""
    stop: limits.StopText | limits.StopTexts | None = None
    cache_salt: limits.CacheSalt = ""
    slo_class: SloClass | None = None
    service_tier: ServiceTier | None = None
    metadata: dict[str, Any] | None = None
    """Returned in the answer."""
    client_metadata: Any = None
    """Ignored; Codex sends it."""
    user: Any = None
    store: bool | None = None
    """Whether the response can be retrieved and continued later, by default true. Responses are kept in memory: until
    they are deleted, the daemon ends, or 256 MiB are full: then the project that has most loses those that it used
    least recently."""
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    reasoning: dict[str, Any] | None = None
    """`effort`: `reasoning_effort` of a chat. Others are ignored."""
    stream_options: Any = None
    truncation: Truncation | None = None
    """`auto`: as many of the oldest exchanges are left out as the context has no room for. Otherwise such a
    request is refused."""
    background: Annotated[Any, Unsupported((False,))] = None
    conversation: Annotated[Any, Unsupported()] = None
    previous_response_id: limits.Text | None = None
    """A stored response, whose input and output come before `input`; its `instructions` do not."""
    prompt: Annotated[Any, Unsupported()] = None
    max_tool_calls: Any = None
    """Ignored: it is about tools that the server runs."""


class CompactRequest(ResponseRequest, frozen=True, kw_only=True):
    """`POST /v1/responses/compact`: the conversation, as a request to continue it has it. `previous_response_id`
    suffices. How the summary is generated, the fields of a response say."""

    input: limits.Text | Annotated[list[InputItem], Meta(max_length=limits.MAX_MESSAGES)] = []


class OutputText(Wire, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class MessageItem(Wire, frozen=True, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class ReasoningText(Wire, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Wire, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: Status
    summary: list[Any] = []


class CallItem(Wire, frozen=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    """JSON as the model wrote it."""
    status: Status


OutputItem = MessageItem | ReasoningItem | CallItem


class ReasoningTokens(Wire, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Wire, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    """Always 0: tokens of reasoning are not counted apart."""


class IncompleteDetails(Wire, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Wire, frozen=True):
    code: str
    message: str


class Response(Wire, frozen=True, kw_only=True):
    """The answer. `incomplete`: it ended at the maximum length."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None
    top_p: float | None
    tools: list[Any]
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions(TextFormat())
    metadata: dict[str, Any] = {}
    object: Literal["response"] = "response"
    store: bool
    background: Literal[False] = False
    truncation: Truncation = "disabled"
    previous_response_id: str | None = None


class CompactedResponse(Wire, frozen=True, kw_only=True):
    """`output`: all messages that are not the assistant's, then a compaction with a summary of the whole. They are the
    `input` of the next request, with its new message behind them. Nothing is stored."""

    id: str
    created_at: int
    output: list[StoredItem]
    usage: ResponseUsage | None
    object: Literal["response.compaction"] = "response.compaction"


class InputTokens(Wire, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
    """Tokens of the prompt, those of previous responses and tools included; it may be more than the context."""


class DeletedResponse(Wire, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(ListPage[StoredItem], frozen=True, kw_only=True):
    """Items before a response's output, also those of the previous responses; newest first unless `order` is `asc`."""


class ResponseEvent(Wire, frozen=True, kw_only=True):
    """One event of a stream. `type` says which fields it has, as OpenAI documents them."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    error: OpenAIErrorInfo | UnsetType = UNSET
