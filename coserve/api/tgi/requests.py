"""Translates requests of LoRAX and TGI into `GenerateRequest`s."""

from __future__ import annotations

from coserve.api.http.body_types import refuse_unless_neutral
from coserve.api.tgi.schemas import BASE_NAME, TgiParameters, TgiRequest
from coserve.core.errors import InvalidRequest
from coserve.core.schemas import GenerateRequest

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
"""Values, other than empty ones, that are accepted for features that are not implemented."""


def tgi_request(body: TgiRequest, *, stream: bool) -> GenerateRequest:
    """Translate a request. Raises `InvalidRequest`, which names the parameter."""
    parameters = body.parameters or TgiParameters()
    for name, defaults in _NEUTRAL.items():
        refuse_unless_neutral(name, getattr(parameters, name), defaults, within="parameters.")
    if stream and parameters.decoder_input_details:
        raise InvalidRequest("expected it left out in streams", field="parameters.decoder_input_details")
    has_warpers = any(value is not None for value in (parameters.temperature, parameters.top_k, parameters.top_p))
    sampled = (parameters.do_sample or has_warpers) and parameters.temperature != 0
    if (parameters.best_of or 1) > 1 and (stream or not sampled or parameters.seed is not None):
        raise InvalidRequest("more than 1 needs sampling, no seed and no stream", field="parameters.best_of")
    scored = stream or has_details(parameters) or (parameters.best_of or 1) > 1
    return GenerateRequest(
        prompt=body.inputs,
        adapter=None if parameters.adapter_id == BASE_NAME else parameters.adapter_id or None,
        stream=stream,
        n=parameters.best_of or 1,
        max_tokens=parameters.max_new_tokens or DEFAULT_TOKENS,
        temperature=(parameters.temperature or 1.0) if sampled else 0.0,
        top_k=parameters.top_k or 0,
        top_p=parameters.top_p or 1.0,
        repetition_penalty=parameters.repetition_penalty or 1.0,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        stop=parameters.stop,
        include_stop_str_in_output=True,
        ignore_eos=parameters.ignore_eos_token or False,
        logprobs=max(parameters.top_n_tokens or 0, parameters.return_k_alternatives or 0) if scored else None,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
        seed=parameters.seed,
    )


def has_details(parameters: TgiParameters) -> bool:
    return bool(parameters.details or parameters.decoder_input_details)
