"""Samples of Tinker's API: ordinary requests of the class batch, whose responses are encoded as protobuf."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from coserve.api.generation.full_response import LogprobEntry, collect
from coserve.api.generation.in_flight import InFlightRequests
from coserve.api.tinker.schemas import TinkerSample
from coserve.api.tinker.wire import Sampled, encode_samples
from coserve.core.errors import InvalidRequest, QueueFull
from coserve.core.schemas.generation import GenerateRequest
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
    full = await collect(request, generation.stream(request, snapshot=snapshot), _Scores)
    prompt, tops = full.prompt or _Scores(), body.topk_sample_logprobs > 0
    pairs = zip(full.response.choices, (scores or _Scores() for scores in full.logprobs), strict=True)
    sequences = [
        Sampled(choice.finish_reason == "stop", choice.token_ids, scores.values, scores.tops if tops else None)
        for choice, scores in pairs
    ]
    return await asyncio.to_thread(  # the first call imports protobuf
        encode_samples,
        sequences,
        prompt.values if body.prompt_logprobs else None,
        prompt.tops if body.topk_prompt_logprobs else None,
        full.response.usage.prompt_tokens_details.cached_tokens,
    )


class _Scores:
    """Log-probabilities of a choice's or the prompt's tokens, and the most likely tokens at each place."""

    def __init__(self) -> None:
        self.values, self.tops = list[float](), list[list[tuple[int, float]]]()

    def add(self, entries: Sequence[LogprobEntry], /) -> None:
        for entry in entries:
            self.values.append(math.nan if entry.logprob is None else entry.logprob)
            self.tops.append([(each.token_id, each.logprob) for each in entry.top])
