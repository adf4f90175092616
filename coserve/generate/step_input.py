"""From the scheduler's shares to the plain data that an executor runs."""

from __future__ import annotations

from collections.abc import Iterable

from coserve.generate.execution.interface import BASE_ONLY, SequenceInput, StepInput
from coserve.generate.sampling.rows import SamplingRow, is_penalised
from coserve.generate.sampling.scoring import PromptScoring
from coserve.generate.schedule import Share
from coserve.generate.sequence_state import SequenceState
from coserve.kernels.attention.interface import TokenRun
from coserve.model.lora import LoraWeights
from coserve.types import AdapterRef


def step_input(shares: Iterable[Share]) -> tuple[StepInput, list[LoraWeights]]:
    """The step that computes the shares, and the weights of its adapters. The sequences are as before the step."""
    places: dict[AdapterRef, int] = {}
    weights: list[LoraWeights] = []
    sequences: list[SequenceInput] = []
    for share in shares:
        sequence, start = share.sequence, share.sequence.computed
        place = BASE_ONLY
        if sequence.weights is not None and sequence.adapter is not None:
            place = places.setdefault(sequence.adapter, len(weights))
            if place == len(weights):
                weights.append(sequence.weights)
        last = share.tokens == sequence.pending and sequence.max_tokens > 0
        sequences.append(
            SequenceInput(
                sequence.number,
                place,
                sequence.tokens[start : start + share.tokens],
                TokenRun(share.tokens, start, tuple(sequence.pages)),
                sampling_row(sequence) if last else None,
                prompt_scoring(share),
                sequence.needs_prompt_logits,
            )
        )
    return StepInput(tuple(places), sequences), weights


def sampling_row(sequence: SequenceState) -> SamplingRow:
    """How to sample the sequence's next token."""
    params, t = sequence.sampling, sequence.generated + sequence.in_flight
    if not is_penalised(params):
        return SamplingRow(sequence.number, params, t, sequence.banned())
    return SamplingRow(sequence.number, params, t, sequence.banned(), sequence.tokens, len(sequence.request.prompt))


def prompt_scoring(share: Share) -> PromptScoring | None:
    """What the share's rows score that was not scored before; None if nothing."""
    sequence, top = share.sequence, share.sequence.sampling.prompt_logprobs
    if top is None:
        return None
    prompt = sequence.request.prompt
    skipped = sequence.scored < len(prompt) and sequence.computed >= sequence.scored
    assert not skipped, "rows that score the prompt were skipped"
    first = max(sequence.scored, sequence.computed + 1)
    end = min(sequence.computed + share.tokens + 1, len(prompt))
    return PromptScoring(first - 1 - sequence.computed, prompt[first:end], top) if first < end else None
