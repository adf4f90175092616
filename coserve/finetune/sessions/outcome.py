"""Outcomes of slices that several tensor-parallel ranks run together, and the resulting verdict on the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coserve.core.errors import JobOutOfMemory
from coserve.core.training.step_metrics import StepMetrics

PEER_FAILED = "peer_failed"
"""Outcome code: the slice was aborted because another rank failed."""
CAPTURE_FAILED = "capture_failed"
"""Outcome code: layers could not be captured in CUDA graphs."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a slice on one rank."""

    code: str = ""
    """Error code; empty: no error."""
    message: str = ""
    updated: bool = False
    """Whether the slice has begun to change the weights, so that the step cannot be retried."""
    metrics: StepMetrics | None = None
    """Metrics of an optimizer step that the slice finished."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a slice from all its outcomes. Without a `code` the job continues."""

    code: str = ""
    message: str = ""
    retry: bool = False
    """Whether all ranks may begin the optimizer step again (`Trainer.retry`): with less memory, or, if the code is
    `CAPTURE_FAILED`, without graphs."""


def judge(outcomes: Sequence[Outcome]) -> Verdict:
    """Judge the outcomes, given by rank.

    The job may retry if all errors are out-of-memory or failed captures, and no rank has changed its weights.
    """
    own = [outcome for outcome in outcomes if outcome.code not in ("", PEER_FAILED)]
    if not own:
        assert not any(outcome.code for outcome in outcomes), "expected the error that other ranks have seen"
        return Verdict()
    first = next((outcome for outcome in own if outcome.code == CAPTURE_FAILED), own[0])
    curable = all(outcome.code in (JobOutOfMemory.code, CAPTURE_FAILED) for outcome in own)
    return Verdict(first.code, first.message, retry=curable and not any(outcome.updated for outcome in outcomes))


@dataclass(frozen=True)
class Retry:
    """How all ranks begin an optimizer step again."""

    lower: bool
    """With lower memory limits; False: only without the existing graphs."""
    stop_graphs: str = ""
    """Why graphs are off from now on; empty: they are not."""


def how_to_retry(verdict: Verdict, *, graphs: bool) -> Retry:
    """Return how to retry after a verdict with `retry`. `graphs`: whether graphs hold memory on rank 0, which decides
    for all ranks so that their batches have the same sizes."""
    if verdict.code == CAPTURE_FAILED:
        return Retry(lower=False, stop_graphs=verdict.message)
    return Retry(lower=not graphs)
