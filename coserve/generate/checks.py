"""Checks of a request's limits, and the errors that end one without a token."""

from __future__ import annotations

from collections.abc import Sequence

from coserve.admission.pool import too_large
from coserve.core.errors import EmptyPrompt, InvalidRequest, NonFiniteLogits, PromptTooLong, RequestError
from coserve.core.link.generation import Generate
from coserve.core.types import BaseSpec
from coserve.generate.sampling.choices import NoToken
from coserve.memory.kv import KvCache
from coserve.queues.request import Request


def allowed_tokens(request: Generate, spec: BaseSpec, prefix: int = 0) -> int:
    """Return how many tokens the request may generate: `max_tokens`, cut to what the context leaves. `prefix`: tokens
    of its KV prefix.

    Raises:
        EmptyPrompt: no prompt tokens.
        PromptTooLong: the prompt fills the context.
        InvalidRequest: too few tokens to generate, or a token id outside of the vocabulary.
    """
    sampling, prompt = request.sampling, len(request.prompt)
    if not request.prompt:
        raise EmptyPrompt("expected at least one prompt token, got none", field="prompt")
    least = 1 if sampling.prompt_logprobs is None else 0
    if sampling.max_tokens < least:
        raise InvalidRequest(f"expected max_tokens of at least {least}, got {sampling.max_tokens}", field="max_tokens")
    _check_ids(request.prompt, spec.vocab, "prompt")
    _check_ids(sampling.stop_token_ids, spec.vocab, "stop_token_ids")
    _check_ids(tuple(sampling.logit_bias), spec.vocab, "logit_bias")
    _check_ids(request.allowed_token_ids or (), spec.vocab, "allowed_token_ids")
    for word in request.bad_words:
        _check_ids(word, spec.vocab, "bad_words")
    if prompt + prefix >= spec.context:
        beside = f", {prefix} of which the adapter's prefix takes" if prefix else ""
        raise PromptTooLong(
            f"expected a prompt shorter than the context of {spec.context} tokens{beside}, got {prompt}", field="prompt"
        )
    return min(sampling.max_tokens, spec.context - prompt - prefix)


def check_fits_pool(request: Generate, max_tokens: int, kv: KvCache, *, adapter_pages: int, prefix: int = 0) -> None:
    """Check that a request fits the pool next to its adapter, which takes `adapter_pages` pages, and with the `prefix`
    tokens of a KV prefix.

    Raises:
        AdapterTooLarge: the adapter leaves no room, whatever the request.
        PromptTooLong: the request does not fit the rest.
    """
    if not kv.shape.has_room_beside(adapter_pages):
        raise too_large(str(request.adapter), adapter_pages, kv.shape)
    prompt, available = len(request.prompt), kv.pool.total - adapter_pages
    # The last token's own keys and values are never needed.
    if kv.pages_for(prefix + prompt + max(max_tokens, 1) - 1) > available:
        left = f" ({available * kv.page_tokens} beside the adapter {request.adapter})" if adapter_pages else ""
        left += f", {prefix} of which the adapter's prefix takes" if prefix else ""
        raise PromptTooLong(
            f"expected prompt and max_tokens to fit the KV pool of {kv.tokens} tokens{left}, "
            f"got {prompt} and {max_tokens}",
            field="prompt",
        )


def no_token_error(request: Request, reason: NoToken) -> RequestError:
    """The error for a request for which no token can be sampled."""
    if reason is NoToken.NONE_LEFT:
        return InvalidRequest("what the request allows (grammar, tokens, words, biases) leaves no token to choose")
    whose = f"the adapter {request.adapter}" if request.adapter else "the base without an adapter"
    return NonFiniteLogits(
        f"expected finite logits, got NaN or infinity from {whose} at token {len(request.tokens)}",
        field="adapter" if request.adapter else None,
    )


def _check_ids(ids: Sequence[int], vocab: int, field: str) -> None:
    """Raise `InvalidRequest` for a token id outside of the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab:
            raise InvalidRequest(f"expected token ids from 0 to {vocab - 1}, got {token}", field=field)
