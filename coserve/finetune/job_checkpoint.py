"""The checkpoints of one job: when one is due, how one is saved, and how the job resumes from the last readable one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from coserve.errors import CheckpointUnreadable, StorageError
from coserve.finetune.checkpoint import load_checkpoint, prune, save_checkpoint
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.progress import TrainingProgress
from coserve.state.folder import DataFolder
from coserve.types import BaseSpec

log = logging.getLogger(__name__)


class JobCheckpoints:
    """Checkpoints of the job of `loop`. At most one is being saved at a time."""

    def __init__(self, folder: DataFolder, base: BaseSpec, loop: TrainingLoop, *, keep: int) -> None:
        self._folder, self._base, self._loop, self._keep = folder, base, loop, keep
        self._taken: TrainingProgress | None = None
        """Of the last snapshot."""
        self._saved: TrainingProgress | None = None
        """Of the last checkpoint on disk."""

    @property
    def due(self) -> bool:
        """The last finished step asks for a checkpoint, and none was tried."""
        progress = self._loop.progress
        every = self._loop.spec.training.checkpoint_steps
        at_its_step = progress.step > 0 and progress.step % every == 0 and progress.pending is None
        return at_its_step and progress not in (self._taken, self._saved)

    def save(self) -> Callable[[], None] | None:
        """Begin a snapshot of the last finished step; training may go on meanwhile. None if that step is on disk already.

        Call the returned function on a thread: the checkpoint is durable when it returns, and all but the last `keep` are
        deleted where the disk allows it. It raises `StorageError`. Raises `RuntimeError` as `TrainingLoop.check_weights`.
        """
        self._loop.check_weights()
        progress = self._loop.progress
        if progress.step == 0 or progress == self._saved:
            return None
        self._taken, tensors = progress, self._loop.optimizer.snapshot()

        def write() -> None:
            save_checkpoint(self._folder, self._loop.spec, self._base, progress, tensors())
            self._saved = progress
            try:
                prune(self._folder, self._loop.spec.id, self._keep, newest=progress.step)
            except StorageError as error:
                log.warning("job %s: old checkpoints stay: %s", self._loop.spec.id, error.message)

        return write

    def resume(self) -> None:
        """Load the last readable checkpoint into the loop; nothing happens if there is none. On a thread.

        Raises `StorageError` where the machine cannot read a checkpoint now.
        """
        spec = self._loop.spec
        for step, path in reversed(self._folder.checkpoints(spec.id)):
            try:
                found = load_checkpoint(path, spec, self._base)
                self._loop.optimizer.restore(found.tensors, steps=found.progress.step)
            except CheckpointUnreadable as error:
                log.warning("job %s: checkpoint %d left aside: %s", spec.id, step, error.message)
                continue
            self._loop.progress = self._saved = found.progress
            return
