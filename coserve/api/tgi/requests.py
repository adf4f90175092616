"""Translates requests of LoRAX and TGI into `GenerateRequest`s."""

from __future__ import annotations

from coserve.api.http.body_types import refuse_unless_neutral
from coserve.api.tgi.schemas import BASE_NAME, TgiParameters, TgiRequest
from coserve.errors import InvalidRequest
from coserve.schemas import GenerateRequest

DEFAULT_TOKENS = 100

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "adapter_source": ("local",),
    "api_token": (),
    "merged_adapters": (),
    "typical_p": (1, 1.0),
    "truncate": (),
    "watermark": (False,),
    "apply_chat_template": (False,),
    "schema": (),
    "response_format": (),
    "grammar": (),
}
"""Values accepted for features that are not implemented, besides empty ones."""


def tgi_request(ask: TgiRequest, *, stream: bool) -> GenerateRequest:
    """Raises `InvalidRequest`, which names the parameter."""
    given = ask.parameters or TgiParameters()
    for name, defaults in _NEUTRAL.items():
        refuse_unless_neutral(name, getattr(given, name), defaults, within="parameters.")
    if stream and given.decoder_input_details:
        raise InvalidRequest("expected it left out in streams", field="parameters.decoder_input_details")
    has_warpers = any(value is not None for value in (given.temperature, given.top_k, given.top_p))
    sampled = (given.do_sample or has_warpers) and given.temperature != 0
    if (given.best_of or 1) > 1 and (stream or not sampled or given.seed is not None):
        raise InvalidRequest("more than 1 needs sampling, no seed and no stream", field="parameters.best_of")
    scored = stream or has_details(given) or (given.best_of or 1) > 1
    return GenerateRequest(
        prompt=ask.inputs,
        adapter=None if given.adapter_id == BASE_NAME else given.adapter_id or None,
        stream=stream,
        n=given.best_of or 1,
        max_tokens=given.max_new_tokens or DEFAULT_TOKENS,
        temperature=(given.temperature or 1.0) if sampled else 0.0,
        top_k=given.top_k or 0,
        top_p=given.top_p or 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        stop=given.stop,
        include_stop_str_in_output=True,
        ignore_eos=given.ignore_eos_token or False,
        logprobs=max(given.top_n_tokens or 0, given.return_k_alternatives or 0) if scored else None,
        prompt_logprobs=0 if given.decoder_input_details else None,
        seed=given.seed,
    )


def has_details(given: TgiParameters) -> bool:
    return bool(given.details or given.decoder_input_details)
