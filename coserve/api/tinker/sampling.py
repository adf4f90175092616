"""Samples of Tinker's API: ordinary requests of the class batch, whose responses are encoded as protobuf."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing

from coserve.api.generation.in_flight import InFlightRequests
from coserve.api.tinker.schemas import TinkerSample
from coserve.api.tinker.wire import Sampled, encode_samples
from coserve.core.errors import InvalidRequest, QueueFull
from coserve.core.schemas import GenerateRequest, Logprob
from coserve.core.types import AdapterRef


def request_of(body: TinkerSample, adapter: str | None) -> GenerateRequest:
    """Return the request. Raises `InvalidRequest`."""
    given, stop = body.sampling_params, body.sampling_params.stop
    texts = [stop] if isinstance(stop, str) else [each for each in stop or [] if isinstance(each, str)]
    ids = [each for each in stop or [] if isinstance(each, int)]
    if texts and ids:
        raise InvalidRequest("expected texts or token ids, got both", field="stop")
    return GenerateRequest(
        prompt=[token for chunk in body.prompt.chunks for token in chunk.tokens],
        adapter=adapter,
        n=body.num_samples,
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        top_k=max(0, given.top_k),
        top_p=given.top_p,
        seed=given.seed,
        stop=texts or None,
        stop_token_ids=ids,
        ignore_eos=stop == [],
        logprobs=body.topk_sample_logprobs,
        prompt_logprobs=body.topk_prompt_logprobs if body.prompt_logprobs or body.topk_prompt_logprobs else None,
        slo_class="batch",
    )


async def sample(
    body: TinkerSample, request: GenerateRequest, snapshot: AdapterRef | None, generation: InFlightRequests
) -> bytes:
    """Return the `SampleResponse`. Waits while the queue is full. Raises as `InFlightRequests.stream`."""
    while True:
        try:
            return await _sample(body, request, snapshot, generation)
        except QueueFull as full:
            await asyncio.sleep(max(1.0, full.retry_after))


async def _sample(
    body: TinkerSample, request: GenerateRequest, snapshot: AdapterRef | None, generation: InFlightRequests
) -> bytes:
    tokens, values = ([list[int]() for _ in range(request.n)], [list[float]() for _ in range(request.n)])
    tops, stopped = [list[list[tuple[int, float]]]() for _ in range(request.n)], [False] * request.n
    prompt, prompt_tops, cached = list[float](), list[list[tuple[int, float]]](), 0
    async with aclosing(generation.stream(request, snapshot=snapshot)) as chunks:
        async for chunk in chunks:
            for entry in chunk.prompt_logprobs or ():
                prompt.append(math.nan if entry.logprob is None else entry.logprob)
                prompt_tops.append(_pairs(entry.top))
            tokens[chunk.index] += chunk.token_ids
            for chosen in chunk.logprobs or ():
                values[chunk.index].append(chosen.logprob)
                tops[chunk.index].append(_pairs(chosen.top))
            stopped[chunk.index] |= chunk.finish_reason == "stop"
            if chunk.usage is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens
    top = body.topk_sample_logprobs > 0
    sequences = [
        Sampled(*each, tops[number] if top else None)
        for number, each in enumerate(zip(stopped, tokens, values, strict=True))
    ]
    return await asyncio.to_thread(  # the first call imports protobuf
        encode_samples,
        sequences,
        prompt if body.prompt_logprobs else None,
        prompt_tops if body.topk_prompt_logprobs else None,
        cached,
    )


def _pairs(top: list[Logprob]) -> list[tuple[int, float]]:
    return [(each.token_id, each.logprob) for each in top]
