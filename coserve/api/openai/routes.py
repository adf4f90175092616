"""The routes of OpenAI's API."""

from __future__ import annotations

from coserve.api.http.route import BODY_ERRORS, BUSY, Route
from coserve.api.openai.errors import openai_route
from coserve.api.openai.handlers import OpenAIApi
from coserve.api.openai.lora import LoraApi
from coserve.api.openai.schemas import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DeletedModel,
    LoadLoraRequest,
    Model,
    ModelList,
    ServerInfo,
    UnloadLoraRequest,
)


def openai_routes(api: OpenAIApi, lora: LoraApi) -> tuple[Route, ...]:
    """Return routes under `/v1`, and those of vLLM that trainers call."""
    errors = (404, 422, *BODY_ERRORS, BUSY)
    return (
        openai_route(
            "POST",
            "/v1/completions",
            api.completions,
            "Generate text, as OpenAI and vLLM do",
            body=CompletionRequest,
            response=Completion,
            events=Completion,
            stream_end=True,
            errors=errors,
        ),
        openai_route(
            "POST",
            "/v1/chat/completions",
            api.chat_completions,
            "Continue a chat, as OpenAI and vLLM do",
            body=ChatRequest,
            response=ChatCompletion,
            events=ChatChunk,
            stream_end=True,
            errors=errors,
        ),
        openai_route(
            "GET",
            "/v1/models",
            api.list_models,
            "List the base and the adapters",
            response=ModelList,
        ),
        openai_route(
            "GET",
            "/v1/models/{id}",
            api.get_model,
            "Show the base or an adapter",
            response=Model,
            slashes=True,
            errors=(404,),
        ),
        openai_route(
            "DELETE",
            "/v1/models/{id}",
            api.delete_model,
            "Delete an adapter: one version (`name@version`, or a fine-tuned model) or all (`name`)",
            response=DeletedModel,
            slashes=True,
            errors=(404, 409, 507),
        ),
        openai_route(
            "POST",
            "/v1/load_lora_adapter",
            lora.load_lora_adapter,
            "Load an adapter, as vLLM does, or one whose tensors are in the body",
            body=LoadLoraRequest,
            upload=("file",),
            media="text/plain",
            errors=(409, *errors, 507),
        ),
        openai_route(
            "POST",
            "/v1/unload_lora_adapter",
            lora.unload_lora_adapter,
            "Unload an adapter, as vLLM does",
            body=UnloadLoraRequest,
            media="text/plain",
            errors=(404, 409, *BODY_ERRORS, BUSY, 507),
        ),
        Route("GET", "/server_info", lora.server_info, "What trainers read of vLLM's settings", response=ServerInfo),
        Route(
            "POST",
            "/pause",
            lora.pause,
            "Let requests run on while a trainer loads an adapter, which needs no pause",
            media="text/plain",
            query=("mode",),
            errors=(400,),
        ),
        Route("POST", "/resume", lora.resume, "End what `/pause` did: nothing", media="text/plain"),
    )
