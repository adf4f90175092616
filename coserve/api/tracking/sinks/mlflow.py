"""MLflow sink, configured by MLflow's variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...; without a URI, a
SQLite file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from coserve.api.tracking.points import Point, Run, Text
from coserve.core.training.jobs import JobState

JOB = "coserve.job"
"""Tag with the job's id, by which a restarted daemon finds the run."""
VALUES = 900
"""Numbers sent at once; a server takes 1000 at most."""
LONGEST = 500
"""Most characters of a parameter."""
STATUS = {JobState.SUCCEEDED: "FINISHED", JobState.FAILED: "FAILED", JobState.CANCELLED: "KILLED"}


class MLflow:
    """MLflow run of one job. Steps that the run already has are omitted."""

    def __init__(self, folder: Path, run: Run, step: int) -> None:
        # By default, the library waits for a server for longer than the daemon waits for a helper process.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder}/mlflow.db"
        self._client = MlflowClient(tracking_uri=address)
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "coserve")
        found = self._client.search_runs([experiment], f"tags.`{JOB}` = '{run.id}'", max_results=1)
        self._id = found[0].info.run_id if found else self._create(experiment, run)
        history = self._client.get_metric_history(self._id, "train/loss")
        self._last = max((metric.step for metric in history), default=0)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _create(self, experiment: str, run: Run) -> str:
        made = self._client.create_run(experiment, run_name=run.name, tags={JOB: run.id})
        id = str(made.info.run_id)
        settings = {re.sub(r"[^\w. :-]", "_", name, flags=re.ASCII): value for name, value in run.settings.items()}
        params = [Param(name, str(value)[:LONGEST]) for name, value in settings.items()]
        self._client.log_batch(id, params=params[:100])
        return id

    def write(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        metrics = [
            Metric(name, value, round(1000 * point.time), point.step)
            for point in points
            if point.step > self._last
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), VALUES):
            self._client.log_batch(self._id, metrics=metrics[start : start + VALUES])
        self._last = max([self._last, *(point.step for point in points)])

    def end(self, state: JobState) -> None:
        self._client.set_terminated(self._id, status=STATUS[state])

    def close(self) -> None:
        """Do nothing: each write is its own request."""
