"""Save a job as a checkpoint, and resume it from its last readable one."""

from __future__ import annotations

import logging

from coserve.errors import CheckpointUnreadable
from coserve.finetune.checkpoint import load_checkpoint, prune, save_checkpoint
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.progress import TrainingProgress
from coserve.model.base import Base
from coserve.state.folder import DataFolder

log = logging.getLogger(__name__)


def save_job(folder: DataFolder, base: Base, loop: TrainingLoop, *, keep: int) -> None:
    """Durable when it returns; deletes all but the last `keep` checkpoints. Raises `StorageFull`, `StorageFailed`."""
    save_checkpoint(folder, loop.spec, base.spec, loop.progress, loop.optimizer.state())
    prune(folder, loop.spec.id, keep)


def resume_job(folder: DataFolder, base: Base, loop: TrainingLoop) -> TrainingProgress | None:
    """Load the job's last readable checkpoint into `loop`; returns its progress, None if there is no checkpoint.

    Raises `StorageError` where the machine cannot read a checkpoint now.
    """
    spec = loop.spec
    for step, path in reversed(folder.checkpoints(spec.id)):
        try:
            found = load_checkpoint(path, spec, base.spec)
            loop.optimizer.restore(found.tensors, steps=found.progress.step)
        except CheckpointUnreadable as error:
            log.warning("job %s: checkpoint %d left aside: %s", spec.id, step, error.message)
            continue
        loop.progress = found.progress
        return found.progress
    return None
