"""Weights & Biases sink, configured by its variables: WANDB_API_KEY, WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, ..."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import wandb

from coserve.api.tracking.points import Point, Run, Text
from coserve.core.training.jobs import JobState


class WeightsAndBiases:
    """W&B run of one job. Its id is the job's, so a restarted daemon continues it. The library ignores steps that a run
    already has."""

    def __init__(self, folder: Path, run: Run, step: int) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "coserve"),
            id=run.id,
            name=run.name,
            config=run.settings,
            dir=str(folder),
            resume="allow",
            reinit="create_new",  # a daemon trains several jobs at once
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )

    def write(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        for point in points:
            self._run.log(point.values, step=point.step)

    def end(self, state: JobState) -> None:
        self._run.summary["state"] = state.value
        self._run.finish(exit_code=0 if state is JobState.SUCCEEDED else 1)

    def close(self) -> None:
        self._run.finish()
