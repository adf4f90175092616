"""The routes that other servers have too, so that their clients work here."""

from __future__ import annotations

from coserve.api.openai_api import OpenAIApi
from coserve.api.openai_errors import OPENAI
from coserve.api.openai_schemas import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Model,
    ModelList,
)
from coserve.api.routes import BODY_ERRORS, BUSY_ERRORS, Route
from coserve.api.tgi import TGI, TgiApi
from coserve.api.tgi_schemas import TgiInfo, TgiRequest, TgiResponse, TgiStreamEvent
from coserve.api.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    Tokenization,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    Version,
)


def openai_routes(api: OpenAIApi) -> tuple[Route, ...]:
    """Everything under `/v1`."""
    errors = (404, 422, *BODY_ERRORS, *BUSY_ERRORS)
    return (
        Route(
            "POST",
            "/v1/completions",
            api.completions,
            "Generate text, as OpenAI and vLLM do",
            body=CompletionRequest,
            answer=Completion,
            events=Completion,
            errors=errors,
            refusals=(OPENAI,),
        ),
        Route(
            "POST",
            "/v1/chat/completions",
            api.chat_completions,
            "Answer a chat, as OpenAI and vLLM do",
            body=ChatRequest,
            answer=ChatCompletion,
            events=ChatChunk,
            errors=errors,
            refusals=(OPENAI,),
        ),
        Route(
            "GET",
            "/v1/models",
            api.list_models,
            "List the base and the adapters",
            answer=ModelList,
            errors=(503,),
            refusals=(OPENAI,),
        ),
        Route(
            "GET",
            "/v1/models/{id}",
            api.get_model,
            "Show the base or an adapter",
            answer=Model,
            slashes=True,
            errors=(404, 503),
            refusals=(OPENAI,),
        ),
    )


def tokenizer_routes(api: Tokenization) -> tuple[Route, ...]:
    """What vLLM has beside `/v1`."""
    return (
        Route(
            "POST",
            "/tokenize",
            api.tokenize,
            "Text or a chat to token ids",
            body=TokenizeRequest,
            answer=TokenizeResponse,
            errors=(404, *BODY_ERRORS, *BUSY_ERRORS),
        ),
        Route(
            "POST",
            "/detokenize",
            api.detokenize,
            "Token ids to text",
            body=DetokenizeRequest,
            answer=DetokenizeResponse,
            errors=(404, *BODY_ERRORS, *BUSY_ERRORS),
        ),
        Route("GET", "/tokenizer_info", api.tokenizer_info, "The tokenizer", answer=TokenizerInfo, errors=(503,)),
        Route("GET", "/version", api.version, "coserve's version", answer=Version),
    )


def tgi_routes(api: TgiApi) -> tuple[Route, ...]:
    """What LoRAX and TGI have beside `/generate` and `/health`."""
    errors = (404, 422, *BODY_ERRORS, *BUSY_ERRORS)
    return (
        Route(
            "POST",
            "/",
            api.generate_root,
            "Generate text, as the clients of LoRAX, TGI and huggingface_hub ask for it",
            body=TgiRequest,
            answer=TgiResponse,
            listed=True,
            events=TgiStreamEvent,
            errors=errors,
            refusals=(TGI,),
        ),
        Route("GET", "/info", api.info, "The base and the limits, as TGI says them", answer=TgiInfo, errors=(503,)),
        Route(
            "POST",
            "/generate_stream",
            api.generate_stream,
            "Generate text as LoRAX and TGI do, a token an event",
            body=TgiRequest,
            events=TgiStreamEvent,
            errors=errors,
            refusals=(TGI,),
        ),
    )
