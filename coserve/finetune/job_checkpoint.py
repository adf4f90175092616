"""Save a job as a checkpoint, and resume it from its last readable one."""

from __future__ import annotations

import logging

from coserve.errors import CheckpointUnreadable
from coserve.finetune.checkpoint import Checkpoint, load_checkpoint, prune, save_checkpoint
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.lora_tensors import named_tensors
from coserve.finetune.progress import TrainingProgress
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from coserve.state.folder import DataFolder

log = logging.getLogger(__name__)

BEST = "best/"
"""Prefix of the names of the best evaluation's weights."""


def save_job(folder: DataFolder, base: Base, loop: TrainingLoop, *, keep: int) -> None:
    """Durable when it returns; deletes all but the last `keep` checkpoints. Raises `StorageFull`, `StorageFailed`."""
    tensors = loop.optimizer.state()
    if loop.best is not None:
        tensors |= {BEST + name: tensor.cpu() for name, tensor in named_tensors(loop.best)}
    save_checkpoint(folder, loop.spec, base.spec, loop.progress, tensors)
    prune(folder, loop.spec.id, keep)


def resume_job(folder: DataFolder, base: Base, loop: TrainingLoop) -> TrainingProgress | None:
    """Load the job's last readable checkpoint into `loop`; returns its progress, None if there is no checkpoint.

    Raises `StorageError` where the machine cannot read a checkpoint now.
    """
    spec = loop.spec
    for step, path in reversed(folder.checkpoints(spec.id)):
        try:
            found = load_checkpoint(path, spec, base.spec)
            best = _best(base, loop, found)
            loop.optimizer.restore(found.tensors, steps=found.progress.step)
        except CheckpointUnreadable as error:
            log.warning("job %s: checkpoint %d left aside: %s", spec.id, step, error.message)
            continue
        loop.progress, loop.best = found.progress, best
        return found.progress
    return None


def _best(base: Base, loop: TrainingLoop, found: Checkpoint) -> LoraWeights | None:
    tensors = {n.removeprefix(BEST): t.to(base.device) for n, t in found.tensors.items() if n.startswith(BEST)}
    return loop.optimizer.adapter(tensors) if tensors else None
