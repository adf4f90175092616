"""The checkpoints of one job: when one is due, how it is saved, and how the job resumes from the last readable one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from coserve.core.errors import CheckpointUnreadable
from coserve.core.link.jobs import JobStarted
from coserve.core.training.jobs import JobSpec
from coserve.core.types import BaseSpec
from coserve.finetune.checkpoint import TrainingProgress, load_checkpoint, prune, save_checkpoint
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.state.folder import DataFolder

log = logging.getLogger(__name__)


class JobCheckpoints:
    """Saves and deletes the checkpoints of one job, the one that `loop` trains. At most one is saved at a time."""

    def __init__(self, folder: DataFolder, base: BaseSpec, loop: TrainingLoop, *, keep: int) -> None:
        self._folder, self._base, self._loop, self._keep = folder, base, loop, keep
        self._taken: TrainingProgress | None = None
        """Progress at the last snapshot."""
        self._saved: TrainingProgress | None = None
        """Progress of the last checkpoint on disk."""
        self._left_aside: set[int] = set()
        """Steps of unusable checkpoints."""
        self._note: str | None = None

    @property
    def due(self) -> bool:
        """Whether the last finished step needs a checkpoint and none was attempted."""
        progress = self._loop.progress
        every = self._loop.spec.training.checkpoint_steps
        at_its_step = progress.step > 0 and progress.step % every == 0 and progress.pending is None
        return at_its_step and progress not in (self._taken, self._saved)

    def save(self) -> Callable[[], None] | None:
        """Begin a snapshot of the last finished step; training may continue meanwhile. None if that step is already on
        disk.

        Call the returned function on a worker thread. When it returns, the checkpoint is durable, and all but the last
        `keep` are deleted if the disk allows it; it raises `StorageError`. `save` itself raises `RuntimeError` like
        `TrainingSession.check_weights`.
        """
        self._loop.session.check_weights()
        progress = self._loop.progress
        if progress.step == 0 or progress == self._saved:
            return None
        self._taken, tensors = progress, self._loop.session.snapshot()

        def write() -> None:
            save_checkpoint(self._folder, self._loop.spec, self._base, progress, tensors())
            self._saved = progress
            self._left_aside.discard(progress.step)
            prune(self._folder, self._loop.spec.id, self._keep, self._left_aside)

        return write

    def started(self) -> JobStarted:
        """The message that the job begins to train."""
        loop = self._loop
        step = loop.progress.step
        return JobStarted(id=loop.spec.id, total_steps=loop.plan.total_steps, resumed_from=step, note=self._note)

    def resume(self) -> None:
        """Load the last readable checkpoint into the loop, if there is one: see `load_last`. The user is told of
        unusable ones."""
        found = load_last(self._folder, self._loop.spec, self._base, self._loop.session.optimizer)
        if found.progress is not None:
            self._loop.progress = self._saved = found.progress
        self._left_aside = set(found.reasons)
        if found.reasons:
            self._note = _left_aside_note(found.reasons, self._loop.progress.step)


class LastCheckpoint(NamedTuple):
    """The last readable checkpoint of a job."""

    progress: TrainingProgress | None
    """Progress at that checkpoint; None: there is none."""
    reasons: Mapping[int, str]
    """Why later checkpoints cannot be used (incomplete, damaged, or of another job, base or optimizer), by step, the
    last step first."""


def load_last(folder: DataFolder, spec: JobSpec, base: BaseSpec, optimizer: AdapterOptimizer) -> LastCheckpoint:
    """Load the job's last readable checkpoint into the optimizer. Call it on a worker thread. Raises `StorageError` if
    the machine cannot read a checkpoint now."""
    reasons: dict[int, str] = {}
    for step, path in reversed(folder.checkpoints(spec.id)):
        try:
            progress, tensors = load_checkpoint(path, spec, base)
            optimizer.restore(tensors, steps=progress.step)
            return LastCheckpoint(progress, reasons)
        except CheckpointUnreadable as error:
            log.warning("job %s: checkpoint %d left aside: %s", spec.id, step, error.message)
            reasons[step] = error.message
    return LastCheckpoint(None, reasons)


def _left_aside_note(reasons: Mapping[int, str], resumes_from: int) -> str:
    """The user's message. `reasons`: why checkpoints are unusable, by step, the last step first."""
    steps, reason = ", ".join(map(str, sorted(reasons))), next(iter(reasons.values()))
    which = f"checkpoints of steps {steps}" if len(reasons) > 1 else f"checkpoint of step {steps}"
    goes_on = f"goes on from step {resumes_from}" if resumes_from else "begins again at its first step"
    return f"the {which} cannot be used ({reason}): the job {goes_on}"
