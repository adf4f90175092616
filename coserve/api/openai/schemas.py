"""The requests and responses of the OpenAI endpoints, with vLLM's further parameters.

Clients send `null` for what they leave out: it is accepted for every optional field. An unknown field is refused by
name, unless its value is empty: null, `""`, `[]`, `{}`, or an object with only such values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from coserve.api.http.body_types import Unsupported
from coserve.core import limits
from coserve.core.messages import ChatMessage, TemplateOptions, Tools
from coserve.core.names import AdapterName
from coserve.core.schemas.generation import Finish, GenerationFields, Usage
from coserve.core.types import Wire

MAX_PROMPTS = 1024
MAX_SEQUENCES = 1024
"""Most prompts times choices of one request."""

ModelName = Annotated[str, Meta(max_length=512)]
"""Name of the base or of an adapter; empty: the base."""


ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]
"""OpenAI's service tiers."""


class StreamOptions(Wire, frozen=True):
    include_usage: bool | None = None
    """One more chunk at the end, without choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """Ignored."""


class SharedParams(GenerationFields, frozen=True):
    """Fields of both completions and chats; null stands for a field's default. The fields from `user` to
    `verbosity` are accepted and ignored; later fields accept only empty and default values.
    """

    model: ModelName | None = None
    """The base's name (or null), `adapter` or `adapter@version`."""
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    """null or -1: a random seed. Of any other value, only the lowest 62 bits count."""
    top_k: Annotated[int, Meta(ge=-1, le=limits.MAX_TOP_K)] | None = None
    """Sample from this many of the most likely tokens. -1 or 0: off. null: the base's default, else 0."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name tokens as `token_id:123`."""
    prompt_logprobs: limits.LogprobCount | None = None
    """Number of likeliest tokens shown with each token of the prompt, in vLLM's format; not with `stream`."""
    service_tier: ServiceTier | None = None
    """flex: `slo_class` batch; priority: `slo_class` interactive; others: none."""
    reasoning_effort: Annotated[str, Meta(max_length=64)] | None = None
    """For chats: passed to a chat template that reads it, such as gpt-oss's, as the variable of this name. Of other
    templates `none` turns thinking off, as `enable_thinking` false does, and more has no effect."""
    include_reasoning: bool = True
    """For chats. false: the answer has no `reasoning_content`."""
    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    verbosity: Any = None

    length_penalty: Annotated[Any, Unsupported((1, 1.0))] = None
    use_beam_search: Annotated[Any, Unsupported((False,))] = None
    spaces_between_special_tokens: Annotated[Any, Unsupported((True,))] = None
    priority: Annotated[Any, Unsupported((0,))] = None


class CompletionRequest(SharedParams, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: (
        limits.Text
        | Annotated[
            list[limits.Text | limits.TokenId | limits.TokenIds], Meta(min_length=1, max_length=limits.MAX_TOKENS)
        ]
    )
    """A text, token ids, or a list of texts or of token ids. Nothing is added to token ids."""
    max_tokens: limits.TokenCount | None = None
    """null: 16. 0, with `echo`: the prompt is scored, nothing generated."""
    echo: bool = False
    """The prompt comes before the text, with its log-probabilities if `logprobs` are asked for."""
    logprobs: limits.LogprobCount | None = None
    add_special_tokens: bool = True
    """false: a text gets no BOS, for prompts that a chat template rendered."""
    best_of: limits.Choices | None = None
    """Choices generated for each prompt. The `n` with the highest mean log-probability per token are returned, best
    first. Not with `stream`. null: `n`."""
    suffix: Annotated[Any, Unsupported()] = None


class ChatRequest(SharedParams, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(max_length=limits.MAX_MESSAGES)]
    """Fields that SDKs send back with earlier messages (`refusal`, `annotations`, ...) are accepted while they are
    empty."""
    tools: Tools | None = None
    """The base's chat template shows them to the model; refused if it does not, unless `tool_choice` or
    `--tool-parser` is set. Calls are parsed into `tool_calls`, unless `tool_choice` is `none`; malformed ones are part
    of `content`."""
    chat_template_kwargs: TemplateOptions | None = None
    """Variables that the base's chat template reads, such as Qwen3's `enable_thinking`."""
    documents: Annotated[list[dict[str, Any]], Meta(max_length=limits.MAX_PARTS)] | None = None
    """For a chat template that reads them, such as Granite's: objects with a `title` and a `text`, for instance."""
    max_completion_tokens: limits.PositiveTokenCount | None = None
    """null: as many as fit."""
    max_tokens: limits.PositiveTokenCount | None = None
    """Older name of `max_completion_tokens`."""
    logprobs: bool = False
    top_logprobs: limits.LogprobCount | None = None
    add_special_tokens: Annotated[Any, Unsupported((False,))] = None
    best_of: Annotated[Any, Unsupported((1,))] = None
    parallel_tool_calls: bool | None = None
    """false: only the first call is returned."""
    tool_choice: Any = None
    """`auto`; `none`; `required`, or `{"type": "function", "function": {"name": "..."}}`: the answer is one call, which
    follows the tool's schema; `{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}`: as if
    these were the only tools, and the mode (`auto` or `required`) the choice."""
    functions: Annotated[Any, Unsupported()] = None
    function_call: Annotated[Any, Unsupported(("none", "auto"))] = None
    modalities: Annotated[Any, Unsupported((["text"],))] = None
    audio: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported(even_empty=True)] = None
    echo: Annotated[Any, Unsupported((False,))] = None
    add_generation_prompt: bool = True
    """false: the chat ends with its last message, without the beginning of an answer."""
    continue_final_message: bool = False
    """The answer continues the last message, and has only what is new. vLLM's users set `add_generation_prompt` to
    false with it; that changes nothing."""


class PromptTokenScore(Wire, frozen=True):
    """`rank`: 1 for the likeliest; null for a token that is not among the likeliest that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptTokens = dict[str, PromptTokenScore] | None
"""The prompt's token and the likeliest at its place, by token id; null for the first, which has no log-probability."""


class CompletionLogprobs(Wire, frozen=True):
    r"""One entry per token; the prompt's first token has null log-probabilities. An incomplete character is
    shown by its bytes, `bytes:\xf0\x9f`. `text_offset`: characters of the text before the token's own; all tokens of
    one character have the same."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Wire, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[PromptTokens] | UnsetType = UNSET


class OpenAIResponse(Wire, frozen=True):
    """Fields of every response, and of each chunk of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    """The base's fingerprint."""


class Completion(OpenAIResponse, frozen=True):
    """The response, and each chunk of a stream."""

    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class ChatTopLogprob(Wire, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatTopLogprob, frozen=True):
    r"""`bytes`: what the token adds to the text, as UTF-8. If it is an incomplete character, `token` shows these bytes:
    `bytes:\xf0\x9f`."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Wire, frozen=True):
    content: list[ChatLogprob]


class CalledFunction(Wire, frozen=True):
    name: str
    arguments: str
    """JSON as the model wrote it: it may be invalid, or incomplete at the maximum length."""


class AnswerToolCall(Wire, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatAnswer(Wire, frozen=True):
    """`content` is null if there is nothing but calls. `reasoning_content`: the text between `<think>` and `</think>`,
    if the base's chat template has reasoning, or that of gpt-oss' analysis channel."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same as `reasoning_content`: vLLM's name."""
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


ChatFinish = Finish | Literal["tool_calls"]
"""`tool_calls`: the answer stopped, and calls tools."""


class ChatChoice(Wire, frozen=True, kw_only=True):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(OpenAIResponse, frozen=True):
    """The whole response."""

    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: list[PromptTokens] | UnsetType = UNSET


class FunctionDelta(Wire, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Wire, frozen=True):
    """The next characters of a call's arguments. Only a call's first delta has `id`, `type` and `name`."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Wire, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Wire, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(OpenAIResponse, frozen=True):
    """One event of a stream."""

    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class Model(Wire, frozen=True):
    """The base, or the current version of an adapter: then `root` is `name@version` and `parent` the base."""

    id: str
    created: int
    max_model_len: int
    root: str
    parent: str | None
    object: Literal["model"] = "model"
    owned_by: Literal["coserve"] = "coserve"


class ModelList(Wire, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class DeletedModel(Wire, frozen=True):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class OpenAIErrorInfo(msgspec.Struct, frozen=True):
    """`param` names the field; `code` is one of coserve's codes, `model_not_found` or `context_length_exceeded`."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIError(msgspec.Struct, frozen=True):
    """The body of every response under `/v1` that is not 2xx."""

    error: OpenAIErrorInfo


class LoadLoraRequest(Wire, frozen=True, omit_defaults=True):
    """Body of `POST /v1/load_lora_adapter`: JSON with `lora_path`, or multipart/form-data with a part `settings` (this
    schema as JSON, without `lora_path`) followed by a part `file` for each of adapter_config.json and
    adapter_model.safetensors.
    """

    lora_name: AdapterName
    lora_path: limits.LocalPath | None = None
    """A folder under the daemon's `data_root`."""
    load_inplace: bool = False
    """Whether the name may exist. Requests that run finish on the weights they began with, later ones use the new ones.
    Versions of the name that were loaded earlier are deleted; those that were imported or trained stay."""


class UnloadLoraRequest(Wire, frozen=True, omit_defaults=True):
    """Body of `POST /v1/unload_lora_adapter`. Versions of the name that were loaded are deleted; running requests
    finish first."""

    lora_name: AdapterName
    lora_int_id: int | None = None
    """Ignored."""


class ServedModel(Wire, frozen=True):
    model: str
    dtype: str
    """`torch.bfloat16`, for instance."""
    max_model_len: int


class ServedLora(Wire, frozen=True):
    max_lora_rank: int
    max_loras: int
    """Most adapters in one step."""


class ServedParallel(Wire, frozen=True):
    tensor_parallel_size: int
    data_parallel_size: Literal[1] = 1


class ServedConfig(Wire, frozen=True):
    model_config: ServedModel
    lora_config: ServedLora
    parallel_config: ServedParallel


class ServerInfo(Wire, frozen=True):
    """Response of `GET /server_info`: the part of vLLM's that trainers read."""

    vllm_config: ServedConfig
