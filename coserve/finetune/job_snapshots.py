"""The adapter of one job in training, as it is served for samples: when one is due, and its copy."""

from __future__ import annotations

from collections.abc import Callable

from coserve.finetune.job import TrainingJob
from coserve.model.lora import LoraWeights


class JobSnapshots:
    """Snapshots of the weights of `job`. At most one is being copied at a time, and no checkpoint is meanwhile."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._taken = 0
        """The step of the last one."""

    @property
    def due(self) -> bool:
        """The last finished step, or the end, asks for samples, and no snapshot of it was tried."""
        loop, progress, training = self._job.loop, self._job.loop.progress, self._job.loop.spec.training
        if not training.sample_prompts or progress.pending is not None or progress.step in (0, self._taken):
            return False
        return progress.step % training.sample_steps == 0 or loop.finished

    def take(self) -> tuple[int, Callable[[], LoraWeights]]:
        """The step, and as `TrainingJob.current_weights`, or of a finished job `final_weights`: what it publishes."""
        self._taken = self._job.loop.progress.step
        finished = self._job.loop.finished
        return self._taken, self._job.final_weights() if finished else self._job.current_weights()
