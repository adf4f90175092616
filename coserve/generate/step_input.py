"""Conversion of scheduled tokens to the plain data that an executor runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coserve.core.types import AdapterRef
from coserve.generate.execution.interface import BASE_ONLY, SequenceInput, StepInput
from coserve.generate.plan import Scheduled
from coserve.generate.sampling.rows import SamplingRow, is_penalised
from coserve.generate.sampling.scoring import PromptScoring
from coserve.kernels.attention.interface import TokenRun
from coserve.model.lora import LoraWeights
from coserve.queues.request import Request


def step_input(
    scheduled: Iterable[Scheduled], in_pages: Callable[[AdapterRef], LoraWeights]
) -> tuple[StepInput, list[LoraWeights]]:
    """Build a step, and the weights of its adapters, looked up by `in_pages`. Call it before the requests' counters
    advance."""
    places: dict[AdapterRef, int] = {}
    weights: list[LoraWeights] = []
    sequences: list[SequenceInput] = []
    for item in scheduled:
        request, start = item.request, item.request.computed
        place = BASE_ONLY
        if (ref := request.paged_adapter) is not None:
            place = places.setdefault(ref, len(weights))
            if place == len(weights):
                weights.append(in_pages(ref))
        last = item.tokens == request.pending and request.max_tokens > 0
        sequences.append(
            SequenceInput(
                request.number,
                place,
                request.tokens[start : start + item.tokens],
                TokenRun(item.tokens, start, request.pages, request.slot),
                sampling_row(request) if last else None,
                prompt_scoring(item),
                request.needs_prompt_logits,
                tuple(request.restored),
                () if request.saved is None else tuple(request.saved.pages),
            )
        )
    return StepInput(tuple(places), sequences), weights


def sampling_row(request: Request) -> SamplingRow:
    """How to sample the sequence's next token."""
    params, t = request.sampling, request.generated + request.in_flight
    masked = request.constraint is not None
    if not is_penalised(params):
        return SamplingRow(request.number, params, t, request.banned(), masked=masked)
    # With tokens in flight, the sampler has counted all earlier ones.
    tokens, prompt = [] if request.in_flight else request.tokens[request.prefix :], len(request.message.prompt)
    return SamplingRow(request.number, params, t, request.banned(), tokens, prompt, masked)


def prompt_scoring(item: Scheduled) -> PromptScoring | None:
    """Which prompt tokens get their log-probabilities from these rows; None: none does."""
    request, top = item.request, item.request.sampling.prompt_logprobs
    if top is None:
        return None
    prompt, end = request.message.prompt, request.prompt_tokens
    skipped = request.scored < end and request.computed >= request.scored
    assert not skipped, "rows that score the prompt were skipped"
    first = max(request.scored, request.computed + 1)
    end, own = min(request.computed + item.tokens + 1, end), request.prefix
    return PromptScoring(first - 1 - request.computed, prompt[first - own : end - own], top) if first < end else None
