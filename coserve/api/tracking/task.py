"""Helper-process tasks of tracking: the libraries are imported there, and keep their threads and connections there."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path

import msgspec

from coserve.api.tracking.points import Point, Run, Text
from coserve.api.tracking.sinks.interface import OpenSink, Sink
from coserve.core.errors import TrackingFailed
from coserve.core.training.jobs import JobState
from coserve.data.offload.protocol import TaskContext

log = logging.getLogger(__name__)

SINKS = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases", "mlflow": "MLflow"}
"""Class of each tracker, in its module."""


class Track(msgspec.Struct, frozen=True):
    """Arguments of `track`: steps and samples of one job. `after`: the last step before them; `ended`: whether the job
    has ended."""

    tracker: str
    folder: str
    run: Run
    after: int
    points: list[Point]
    texts: list[Text]
    ended: JobState | None


class CloseAll(msgspec.Struct, frozen=True):
    """Arguments of `close_all`."""


def track(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Helper task: send `Track`'s records; returns nothing. The job's sink stays open for the next call. Raises
    `TrackingFailed`."""
    given = msgspec.msgpack.decode(arguments, type=Track)
    id = given.run.id
    try:
        if id not in context.kept:
            Path(given.folder).mkdir(parents=True, exist_ok=True)
            context.kept[id] = _opener(given.tracker)(Path(given.folder), given.run, given.after + 1)
        sink: Sink = context.kept[id]
        sink.write(given.points, given.texts)
        if given.ended is not None:
            sink.end(given.ended)
            del context.kept[id]
    except Exception as error:  # any kind: trackers' libraries have errors of their own
        _close(context, id)  # the next attempt reopens it
        raise TrackingFailed(f"{type(error).__name__}: {error}"[:300]) from error
    return b""


def close_all(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Helper task: close all open runs; returns nothing."""
    for id in tuple(context.kept):
        _close(context, id)
    return b""


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
