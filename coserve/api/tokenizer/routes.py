"""The routes of the tokenizer, as vLLM has them."""

from __future__ import annotations

from coserve.api.http.route import BODY_ERRORS, BUSY, Route
from coserve.api.tokenizer.handlers import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizerApi,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    Version,
)


def tokenizer_routes(api: TokenizerApi) -> tuple[Route, ...]:
    """The tokenizer routes of vLLM outside `/v1`."""
    return (
        Route(
            "POST",
            "/tokenize",
            api.tokenize,
            "Text or a chat to token ids",
            body=TokenizeRequest,
            response=TokenizeResponse,
            errors=(404, *BODY_ERRORS, BUSY),
        ),
        Route(
            "POST",
            "/detokenize",
            api.detokenize,
            "Token ids to text",
            body=DetokenizeRequest,
            response=DetokenizeResponse,
            errors=(404, *BODY_ERRORS, BUSY),
        ),
        Route("GET", "/tokenizer_info", api.tokenizer_info, "The tokenizer", response=TokenizerInfo),
        Route("GET", "/version", api.version, "coserve's version", response=Version),
    )
