"""Errors in OpenAI's format and wording, with OpenAI's names of fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from coserve.api.http.responses import ErrorFormat, error_info
from coserve.api.http.route import Route
from coserve.api.openai.schemas import OpenAIError, OpenAIErrorInfo
from coserve.core import errors
from coserve.core.hints import near_miss

PREFIX = "/v1"
"""OpenAI's paths: every error under it has OpenAI's shape."""

_PARAMS = {"adapter": "model", "continue_from": "model"}
_FEATURES = {
    "assistants": "assistants are",
    "audio": "speech and transcription are",
    "classify": "classification is",
    "containers": "containers are",
    "conversations": "conversations are",
    "embeddings": "embeddings are",
    "evals": "evals are",
    "fine_tuning": "permissions of checkpoints and graders are",
    "images": "images are",
    "messages": "Anthropic's message batches (use /v1/batches) are",
    "moderations": "moderations are",
    "organization": "organizations are",
    "pooling": "pooling is",
    "realtime": "realtime sessions are",
    "rerank": "reranking is",
    "responses": "cancelled responses are",
    "score": "scores of pairs of texts are",
    "threads": "threads are",
    "uploads": "uploads are",
    "vector_stores": "vector stores are",
    "videos": "videos are",
}
"""Features of OpenAI and vLLM that are missing here, by the first part of their path under `/v1`."""
_FEATURES_OF_VLLM = {name: _FEATURES[name] for name in ("classify", "pooling", "rerank", "score")} | dict.fromkeys(
    ("sleep", "wake_up", "is_sleeping"), "sleep mode is"
)
"""Features that vLLM also has at paths without `/v1`."""
_MEANT = {"jobs": "/finetune", "load": "/metrics", "lora": "/adapters", "loras": "/adapters"}
"""Our equivalents of other servers' paths, by the first part of their path."""


def _type(error: errors.CoserveError) -> str:
    match error:
        case errors.Unauthorized():
            return "authentication_error"
        case errors.QueueFull():
            return "rate_limit_error"
    if error.status == 404:
        return "not_found_error"
    return "invalid_request_error" if error.status < 500 else "server_error"


def openai_error(error: errors.CoserveError, params: Mapping[str, str] = _PARAMS) -> OpenAIError:
    """Return the error as `{"error": {"message", "type", "param", "code"}}`. `params`: the dialect's field names."""
    info = error_info(error)
    message, code = info.message, info.code
    if isinstance(error, errors.AdapterNotFound):
        message, code = f"{message}; GET {PREFIX}/models lists the base and its adapters", "model_not_found"
    elif isinstance(error, errors.PromptTooLong):
        message, code = _too_long(error), "context_length_exceeded"
    unknown = isinstance(error, errors.UnknownField)  # it has the name that the client gave it
    param = info.field if info.field is None or unknown else params.get(info.field, info.field)
    if unknown and param is not None and param not in message:
        message = f"{param}: {message}"  # which names the last part of its path alone
    message = str(errors.CoserveError(message, field=param))  # with the field in front, like all messages
    return OpenAIError(error=OpenAIErrorInfo(message=message, type=_type(error), param=param, code=code))


def _too_long(error: errors.PromptTooLong) -> str:
    """Return OpenAI's wording, because clients parse these words and numbers."""
    if error.context is None:
        return error.message
    part = error.field or "prompt"
    text = f"This model's maximum context length is {error.context} tokens. "
    if error.length is None:
        text += f"However, your {part} cannot fit: {error.message}. "
    else:
        asked = f"{error.length} in the {part}, at least 1 in the completion"
        text += f"However, you requested {error.length + 1} tokens ({asked}). "
    return text + f"Please reduce the length of the {part}."


def is_openai(path: str) -> bool:
    return path == PREFIX or path.startswith(PREFIX + "/")


def no_such_path(path: str, known: Iterable[str]) -> errors.NotFound:
    """Return the error for a path without a route; it names a missing feature of OpenAI or vLLM. `known`: paths of the
    routes, one of which may be meant, such as that with `/v1` in front."""
    whole = path.removeprefix(PREFIX).removeprefix("/v2").strip("/")
    first = whole.partition("/")[0]
    features = _FEATURES if is_openai(path) else _FEATURES_OF_VLLM
    feature = features.get(whole, features.get(first))
    if feature is not None:
        return errors.NotFound(f"{feature} not implemented")
    meant = f"; did you mean {_MEANT[first]!r}?" if first in _MEANT else near_miss(path[:80], known)
    if not meant and path.startswith(("/adapters/", "/aliases/")):
        meant = "; in a path the '/' of a name is written %2F"
    return errors.NotFound(f"there is no such path{meant}")


OPENAI_ERRORS = ErrorFormat(OpenAIError, openai_error)
openai_route = partial(Route, dialect=True, error_formats=(OPENAI_ERRORS,))
"""Makes a route whose bodies are as OpenAI's clients send them, and whose errors have OpenAI's format."""
