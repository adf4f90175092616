"""Translates OpenAI's requests into `GenerateRequest`s."""

from __future__ import annotations

from typing import Any

from coserve.api.http.body_types import refuse_unless_neutral, refuse_unsupported
from coserve.api.openai import schemas
from coserve.api.openai.names import PREFIX, ref_of
from coserve.api.openai.tool_choice import forced_call
from coserve.core.errors import AdapterNotFound, EmptyPrompt, InvalidRequest
from coserve.core.limits import MAX_SEED, TokenId
from coserve.core.messages import TemplateOptions
from coserve.core.names import is_adapter_ref
from coserve.core.schemas.generation import GenerateRequest, GenerationFields
from coserve.core.schemas.output_format import StructuredOutputs
from coserve.core.types import BaseSpec, SloClass
from coserve.data.pretrained.chat import THINKING

DEFAULT_TOKENS = 16
"""Default `max_tokens` of `/v1/completions`, as OpenAI's."""
PLACEHOLDER_MODELS = ("tgi", "dummy")
"""Model names that TGI's client and huggingface_hub's send to a server with one model."""

_CLASSES: dict[str, SloClass] = {"flex": "batch", "priority": "interactive"}
"""Request class of each service tier."""


def adapter_of(model: schemas.ModelName | None, base: str) -> str | None:
    """Return the adapter that `model` names; None: the base, which is called `base`. Raises `AdapterNotFound`."""
    if not model or model == base:
        return None
    if model.startswith(PREFIX) and (ref := ref_of(model, base)) is not None:
        return ref
    if not is_adapter_ref(model):
        raise AdapterNotFound(f"there is no model {model[:80]!r}", field="model")
    return model


def completion_requests(body: schemas.CompletionRequest, spec: BaseSpec, max_queue: int) -> list[GenerateRequest]:
    """Return one request for each prompt. `max_queue`: most choices that may wait. Raises `InvalidRequest`,
    `EmptyPrompt`, `AdapterNotFound`."""
    _check(body)
    refuse_unless_neutral("reasoning_effort", body.reasoning_effort, ("none",))
    refuse_unless_neutral("include_reasoning", body.include_reasoning, (True,))
    prompts, candidates = _prompts(body.prompt), max(body.n, body.best_of or body.n)
    if body.best_of is not None and body.best_of < body.n:
        raise InvalidRequest(f"expected at least n, {body.n}, got {body.best_of}", field="best_of")
    if candidates > body.n and body.stream:
        raise InvalidRequest(f"expected n, {body.n}, with stream, got {candidates}", field="best_of")
    choices, most = len(prompts) * candidates, min(schemas.MAX_SEQUENCES, max_queue)
    if choices > most:
        why = "" if most == schemas.MAX_SEQUENCES else " (the daemon's max_queue)"
        raise InvalidRequest(
            f"expected at most {most} choices of all prompts{why}, got {choices}",
            field="n" if candidates == body.n else "best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("expected at least 1 (0 needs echo), got 0", field="max_tokens")
    if body.echo and body.truncate_prompt_tokens is not None:
        raise InvalidRequest("expected it without echo", field="truncate_prompt_tokens")
    scored = body.echo and (body.logprobs is not None or body.max_tokens == 0)
    if scored and body.stream and body.n > 1:
        raise InvalidRequest(f"expected 1 with echo, logprobs and stream, got {body.n}", field="n")
    max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    counts = [body.prompt_logprobs, (body.logprobs or 0) if scored else None]
    prompt_logprobs = max((count for count in counts if count is not None), default=None)
    logprobs = body.logprobs if candidates == body.n else body.logprobs or 0
    shared = _shared_fields(body, spec) | {"n": candidates}
    return [
        GenerateRequest(
            **shared,
            prompt=prompt,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            add_special_tokens=body.add_special_tokens,
        )
        for prompt in prompts
    ]


def chat_request(body: schemas.ChatRequest, spec: BaseSpec, template: str | None) -> GenerateRequest:
    """Translate a chat request. `template`: the base's chat template. Raises `InvalidRequest`, `AdapterNotFound`."""
    _check(body)
    call = forced_call(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", field="top_logprobs")
    shared = _shared_fields(body, spec)
    if call is not None:
        shared["structured_outputs"] = StructuredOutputs(json=call)
    return GenerateRequest(
        **shared,
        messages=body.messages,
        tools=body.tools or None,
        chat_template_kwargs=_template_options(body, template or "") or None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def _template_options(body: schemas.ChatRequest, template: str) -> TemplateOptions:
    """Return the chat template's variables. Some clients send an effort to every model: a template that reads none gets
    none, and `none` turns its thinking off."""
    options = body.chat_template_kwargs or {}
    if body.documents:
        options = {"documents": body.documents} | options
    if "reasoning_effort" in template:
        return {"reasoning_effort": body.reasoning_effort, **options} if body.reasoning_effort else options
    return dict.fromkeys(THINKING, False) | options if body.reasoning_effort == "none" else options


def _check(body: schemas.SharedParams) -> None:
    """Raise `InvalidRequest` for features that are not implemented, by name."""
    refuse_unsupported(body)
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("expected prompt_logprobs without stream only", field="prompt_logprobs")
    options = body.stream_options or schemas.StreamOptions()
    if (options.include_usage or options.continuous_usage_stats) and not body.stream:
        raise InvalidRequest("expected stream_options with stream only", field="stream_options")


def _prompts(prompt: str | list[str | TokenId | list[TokenId]]) -> list[str | list[TokenId]]:
    """Return the prompts as a list, from a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [entry for entry in prompt if isinstance(entry, int)]
    if ids and len(ids) == len(prompt):
        return [ids]
    texts = [entry for entry in prompt if isinstance(entry, str)]
    lists = [entry for entry in prompt if isinstance(entry, list)]
    if len(prompt) > schemas.MAX_PROMPTS:
        raise InvalidRequest(f"expected at most {schemas.MAX_PROMPTS} prompts, got {len(prompt)}", field="prompt")
    if len(prompt) not in (len(texts), len(lists)):
        raise InvalidRequest("expected a text, token ids, or a list of one of them, got a mixture", field="prompt")
    found: list[str | list[TokenId]] = [*texts, *lists]
    if any(not entry for entry in found):
        raise EmptyPrompt("expected prompts with at least one token each", field="prompt")
    return found


def _shared_fields(body: schemas.SharedParams, spec: BaseSpec) -> dict[str, Any]:
    """Return the fields of the `GenerateRequest` that completions and chats give alike. Raises `AdapterNotFound`."""
    counted = body.stream_options is not None and body.stream_options.continuous_usage_stats
    return {name: getattr(body, name) for name in GenerationFields.__struct_fields__} | {
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "slo_class": body.slo_class or _CLASSES.get(body.service_tier or "auto"),
        "adapter": adapter_of(body.model, spec.name),
        "return_prompt_ids": bool(body.return_token_ids or counted),
        "seed": None if body.seed is None or body.seed == -1 else body.seed & MAX_SEED,
    }
