"""Helper-process tasks of tracking, and the interface of a tracker's library, which stores the curve of one job: the
libraries are imported there, and keep their threads and connections there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from coserve.api.tracking.points import Point, Run, Text
from coserve.core.errors import TrackingFailed
from coserve.core.training.jobs import JobState
from coserve.data.offload.protocol import TaskContext

log = logging.getLogger(__name__)

SINKS = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases", "mlflow": "MLflow"}
"""Class of each tracker, in its module."""


class Sink(Protocol):
    """One job's run in a tracker. Every method may raise whatever the library raises; the sink is then reopened."""

    def write(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        """Add steps, ascending, and samples of these or earlier steps; the library has them when this returns. A sink
        may omit samples, and may store those of a killed process twice."""
        ...

    def end(self, state: JobState) -> None:
        """Mark the run as ended: the job has ended."""
        ...

    def close(self) -> None:
        """Close the run before the process ends; the job may continue in another process."""
        ...


OpenSink = Callable[[Path, Run, int], Sink]
"""`(folder, run, step)`: open a run or continue it. Points from `step` on follow. Points that the run already has are
replaced or kept, never stored twice. `folder` is the tracker's own and exists."""


def track(
    context: TaskContext,
    tracker: str,
    folder: str,
    run: Run,
    after: int,
    points: list[Point],
    texts: list[Text],
    ended: JobState | None,
) -> None:
    """Helper task: send steps and samples of one job. `after`: the last step before them; `ended`: the state in which
    the job has ended, if it has. The job's sink stays open for the next call. Raises `TrackingFailed`."""
    try:
        if run.id not in context.kept:
            Path(folder).mkdir(parents=True, exist_ok=True)
            context.kept[run.id] = _opener(tracker)(Path(folder), run, after + 1)
        sink: Sink = context.kept[run.id]
        sink.write(points, texts)
        if ended is not None:
            sink.end(ended)
            del context.kept[run.id]
    except Exception as error:  # any kind: trackers' libraries have errors of their own
        _close(context, run.id)  # the next attempt reopens it
        raise TrackingFailed(f"{type(error).__name__}: {error}"[:300]) from error


def close_all(context: TaskContext) -> None:
    """Helper task: close all open runs."""
    for id in tuple(context.kept):
        _close(context, id)


def _close(context: TaskContext, id: str) -> None:
    if id not in context.kept:
        return
    try:
        context.kept.pop(id).close()
    except Exception as error:  # noqa: BLE001 - whatever a tracker's library raises
        log.debug("the run of job %s was not closed: %s", id, error)


def _opener(tracker: str) -> OpenSink:
    found: OpenSink = getattr(import_module(f"coserve.api.tracking.sinks.{tracker}"), SINKS[tracker])
    return found
