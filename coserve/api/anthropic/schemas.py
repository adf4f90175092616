"""Bodies and events of Anthropic's `/v1/messages`, as far as its clients read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from coserve.api.http.body_types import Unsupported
from coserve.api.openai.schemas import ModelName
from coserve.core import limits
from coserve.core.messages import MAX_TOOLS
from coserve.core.schemas.output_format import JsonSchema
from coserve.core.types import SloClass, Wire


class TextBlock(Wire, frozen=True, omit_defaults=True, tag_field="type", tag="text"):
    text: limits.Text
    citations: Any = None
    cache_control: Any = None
    """Ignored: prefixes are cached without it."""


class ToolUseBlock(Wire, frozen=True, omit_defaults=True, tag_field="type", tag="tool_use"):
    id: limits.AuthorName
    name: limits.AuthorName
    input: dict[str, Any]
    caller: Any = None
    cache_control: Any = None


class ToolResultBlock(Wire, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: limits.AuthorName
    content: limits.Text | Annotated[list[TextBlock], Meta(max_length=limits.MAX_PARTS)] | None = None
    is_error: bool | None = None
    """Ignored: the model reads the result's text."""
    cache_control: Any = None


class ThinkingBlock(Wire, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer, for chat templates that read it."""

    thinking: limits.Text
    signature: Any = ""


class RedactedThinkingBlock(Wire, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only Anthropic can read; left out of the prompt."""

    data: Any = ""


InputBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class InputMessage(Wire, frozen=True):
    """Images and documents are refused. A last message of the assistant is the beginning of the answer."""

    role: Literal["user", "assistant", "system"]
    content: limits.Text | Annotated[list[InputBlock], Meta(max_length=limits.MAX_PARTS)]


class CustomTool(Wire, frozen=True):
    """A tool of the client. Tools that the server would run are refused."""

    name: limits.AuthorName
    input_schema: JsonSchema
    description: limits.Text | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    input_examples: Any = None
    cache_control: Any = None
    eager_input_streaming: Any = None


class ToolChoice(Wire, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: limits.AuthorName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"]
    """Sets the variable `enable_thinking` of chat templates that read it: false for `disabled`, else true."""
    budget_tokens: Any = None
    display: Any = None


class OutputFormat(Wire, frozen=True):
    type: Literal["json_schema"]
    schema: JsonSchema


class OutputConfig(Wire, frozen=True):
    format: OutputFormat | None = None
    """JSON that follows a schema."""
    effort: Any = None


class CountTokensRequest(Wire, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`. Fields of type any are ignored."""

    messages: Annotated[list[InputMessage], Meta(max_length=limits.MAX_MESSAGES)]
    model: ModelName | None = None
    """The base's name (or null), or an adapter."""
    system: limits.Text | Annotated[list[TextBlock], Meta(max_length=limits.MAX_PARTS)] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""
    context_management: Any = None
    cache_control: Any = None
    speed: Any = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """`POST /v1/messages`. Fields of type any are ignored, except `container` and `mcp_servers`, which are refused."""

    max_tokens: limits.PositiveTokenCount
    stop_sequences: limits.StopTexts | None = None
    stream: bool = False
    temperature: limits.Temperature | None = None
    top_k: limits.TopK | None = None
    top_p: limits.TopP | None = None
    slo_class: SloClass | None = None
    """Class whose latency targets in the daemon's settings apply; null: `interactive`."""
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    container: Annotated[Any, Unsupported()] = None
    mcp_servers: Annotated[Any, Unsupported()] = None


class TokenCountResponse(Wire, frozen=True):
    input_tokens: int


OutputBlock = TextBlock | ToolUseBlock | ThinkingBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Wire, frozen=True):
    """`input_tokens`: prompt tokens that were not in the prefix cache; `cache_read_input_tokens`: those that were."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int = 0


class Message(Wire, frozen=True, kw_only=True):
    """The answer. A stream begins with one that has no content and no reason."""

    id: str
    model: str
    content: list[OutputBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class EventDelta(Wire, frozen=True, kw_only=True):
    """A block's delta has `type` and the field of that type; the message's delta has `stop_reason` and
    `stop_sequence`."""

    type: Literal["text_delta", "input_json_delta", "thinking_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Wire, frozen=True, kw_only=True):
    """One event of a stream. `type` says which fields it has, as Anthropic documents them."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: OutputBlock | UnsetType = UNSET
    delta: EventDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class AnthropicErrorInfo(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True):
    """The body of every response that is not 2xx, and the event `error`."""

    error: AnthropicErrorInfo
    type: Literal["error"] = "error"
