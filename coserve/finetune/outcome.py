"""Slices that several ranks run together: what came of one on each rank, and what that means for the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coserve.core.errors import JobOutOfMemory
from coserve.core.step_metrics import StepMetrics

PEER_FAILED = "peer_failed"
"""Code of an outcome: the slice was aborted because another rank failed."""
CAPTURE_FAILED = "capture_failed"
"""Code of an outcome: layers could not be captured in CUDA graphs."""


@dataclass(frozen=True)
class Outcome:
    """What came of a slice on one rank."""

    position: int
    """A digest of how far the job is: equal on ranks that can go on together (`TrainingLoop.position`)."""
    code: str = ""
    """Of the error; empty: none."""
    message: str = ""
    metrics: StepMetrics | None = None
    """Of an optimizer step that is now done."""


@dataclass(frozen=True)
class Verdict:
    """What a slice's outcomes mean. Without a `code` the job goes on."""

    code: str = ""
    message: str = ""
    retry: bool = False
    """All ranks may begin the optimizer step again (`Trainer.retry`), with less memory or, where the code is
    `CAPTURE_FAILED`, without graphs."""


def judge(outcomes: Sequence[Outcome]) -> Verdict:
    """`outcomes`: by rank.

    The job may try again if all errors are lack of memory, or captures that failed, and no rank is further than the
    others: one that has updated its weights cannot go back.
    """
    own = [outcome for outcome in outcomes if outcome.code not in ("", PEER_FAILED)]
    if not own:
        assert not any(outcome.code for outcome in outcomes), "expected the error that other ranks have seen"
        return Verdict()
    together = len({outcome.position for outcome in outcomes}) == 1
    first = next((outcome for outcome in own if outcome.code == CAPTURE_FAILED), own[0])
    curable = all(outcome.code in (JobOutOfMemory.code, CAPTURE_FAILED) for outcome in own)
    return Verdict(first.code, first.message, retry=curable and together)


@dataclass(frozen=True)
class Retry:
    """How all ranks begin an optimizer step again."""

    lower: bool
    """With less memory; else without the graphs that there are."""
    stop_graphs: str = ""
    """Why there are no graphs from now on; empty: there may be."""


def how_to_retry(verdict: Verdict, *, graphs: bool) -> Retry:
    """Of a verdict to `retry`. `graphs`: graphs hold memory on rank 0, which decides for all ranks, so that their
    batches have the same sizes."""
    if verdict.code == CAPTURE_FAILED:
        return Retry(lower=False, stop_graphs=verdict.message)
    return Retry(lower=not graphs)
