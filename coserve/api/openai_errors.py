"""Errors in OpenAI's shape, and the names of fields that go by another name there."""

from __future__ import annotations

from coserve.api.answers import Refusal, describe
from coserve.api.openai_schemas import OpenAIError, OpenAIErrorInfo
from coserve.errors import AdapterNotFound, CoserveError, QueueFull, Unauthorized

_PARAMS = {"adapter": "model"}


def _type(error: CoserveError) -> str:
    match error:
        case Unauthorized():
            return "authentication_error"
        case QueueFull():
            return "rate_limit_error"
    if error.status == 404:
        return "not_found_error"
    return "invalid_request_error" if error.status < 500 else "server_error"


def openai_error(error: CoserveError) -> OpenAIError:
    """`{"error": {"message", "type", "param", "code"}}`."""
    said = describe(error)
    code = "model_not_found" if isinstance(error, AdapterNotFound) else said.code
    param = None if said.field is None else _PARAMS.get(said.field, said.field)
    return OpenAIError(error=OpenAIErrorInfo(message=said.message, type=_type(error), param=param, code=code))


OPENAI = Refusal(OpenAIError, openai_error)
