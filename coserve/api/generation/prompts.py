"""Converts generation requests to engine input: prompt token ids and sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable

from coserve.api.generation.async_tokenizer import AsyncTokenizer, check_tokens, last_tokens
from coserve.core.errors import EmptyPrompt, InvalidRequest, PromptTooLong
from coserve.core.limits import MAX_PROMPT_LOGPROBS
from coserve.core.messages import Chat, characters
from coserve.core.sampling import NEUTRAL, SamplingFields, SamplingParams
from coserve.core.schemas.generation import GenerateRequest
from coserve.core.types import BaseSpec
from coserve.core.validation import above_vocabulary, check_one_given
from coserve.data.pretrained.tokenizer import Tokenizer

LONGEST_TOKEN = 256
"""Characters of the longest token. A text longer than this times the context is refused before it is tokenised."""


def check_generate(request: GenerateRequest, spec: BaseSpec) -> None:
    """Check what the types cannot express. Raises `InvalidRequest`, `EmptyPrompt`."""
    check_one_given({"prompt": request.prompt, "messages": request.messages}, field="prompt")
    if request.prompt is not None and len(request.prompt) == 0:
        raise EmptyPrompt("expected a prompt with at least one token", field="prompt")
    if request.messages is not None and not request.messages:
        raise EmptyPrompt("expected at least one message", field="messages")
    for name in ("tools", "chat_template_kwargs", "continue_final_message"):
        if getattr(request, name) and request.messages is None:
            raise InvalidRequest("expected it with messages only", field=name)
    most = spec.context if request.max_tokens is None else request.max_tokens
    if most > spec.context:
        raise InvalidRequest(f"expected at most the context, {spec.context}, got {most}", field="max_tokens")
    if most == 0 and request.prompt_logprobs is None:
        raise InvalidRequest("expected at least 1 (0 needs prompt_logprobs), got 0", field="max_tokens")
    if request.min_tokens > most:
        raise InvalidRequest(f"expected at most max_tokens, {most}, got {request.min_tokens}", field="min_tokens")
    if _kept(request, spec) == 0:
        got = f"{request.truncate_prompt_tokens} with {most} new tokens"
        raise InvalidRequest(f"expected room for a token of the prompt, got {got}", field="truncate_prompt_tokens")
    prompt = request.prompt if isinstance(request.prompt, list) else []
    for field, tokens in (
        ("prompt", prompt),
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", request.logit_bias),
        ("allowed_token_ids", request.allowed_token_ids),
    ):
        if wrong := above_vocabulary(tokens or (), spec.vocab):
            raise InvalidRequest(wrong, field=field)


def _kept(request: GenerateRequest, spec: BaseSpec) -> int | None:
    """Return the most tokens that a longer prompt keeps; None: all."""
    keep = request.truncate_prompt_tokens
    return spec.context - max(1, request.max_tokens or 0) if keep == -1 else keep


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, with and without a space before it, as vLLM does. May run on any thread."""
    forms = (form for word in words for form in (word.lstrip(), f" {word.lstrip()}"))
    found = dict.fromkeys(tuple(tokenizer.encode_continuation(form)) for form in forms)
    return tuple(ids for ids in found if ids)


async def encode_prompt(request: GenerateRequest, spec: BaseSpec, texts: AsyncTokenizer) -> tuple[int, ...]:
    """Return token ids of the prompt. Raises `EmptyPrompt`, `PromptTooLong`, and `InvalidRequest` from the chat
    template."""
    try:
        return await _encode(request, spec, texts)
    except PromptTooLong as error:
        if not spec.context_note:
            raise
        message = f"{error.message} ({spec.context_note})"
        raise PromptTooLong(message, field=error.field, context=error.context, length=error.length) from error


async def _encode(request: GenerateRequest, spec: BaseSpec, texts: AsyncTokenizer) -> tuple[int, ...]:
    keep = _kept(request, spec)
    if isinstance(request.prompt, list):
        field, ids = "prompt", last_tokens(request.prompt, keep)
    elif request.prompt is not None:
        field, text = "prompt", request.prompt
        check_characters(len(text), spec.context, field)
        ids = await texts.encode(
            text, context=spec.context, field=field, add_special=request.add_special_tokens, keep=keep
        )
    else:
        field, turns = "messages", request.messages or []
        check_characters(characters(turns), spec.context, field)
        chat = Chat(
            messages=turns,
            tools=request.tools or [],
            options=request.chat_template_kwargs or {},
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        ids = await texts.chat(chat, context=spec.context, keep=keep)
    if not ids:
        raise EmptyPrompt("expected a prompt with at least one token", field=field)
    check_tokens(len(ids), spec.context, field)
    if request.prompt_logprobs is not None and len(ids) * (request.prompt_logprobs + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"expected at most {MAX_PROMPT_LOGPROBS} log-probabilities of a prompt, "
            f"got {len(ids)} tokens and {request.prompt_logprobs}",
            field="prompt_logprobs",
        )
    return tuple(ids)


def check_characters(length: int, context: int, field: str) -> None:
    """Raise `PromptTooLong` for a text that cannot fit, before it is tokenised."""
    limit = context * LONGEST_TOKEN
    if length > limit:
        raise PromptTooLong(f"expected at most {limit} characters, got {length}", field=field, context=context)


def sampling_params(
    request: GenerateRequest, index: int, seed: int, max_new_tokens: int, stop_token_ids: Iterable[int]
) -> SamplingParams:
    """Return the sampling parameters of choice `index`. `max_new_tokens`: how many tokens fit after the prompt;
    `stop_token_ids`: the ids from `stop_tokens`."""
    request = NEUTRAL.fill(request)
    return SamplingParams(
        **{name: getattr(request, name) for name in SamplingFields.__struct_fields__},
        max_tokens=max_new_tokens if request.max_tokens is None else request.max_tokens,
        stop_token_ids=tuple(stop_token_ids),
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs if index == 0 else None,
        seed=seed + index,
    )
