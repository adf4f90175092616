"""Checkpoint files of a job: fp32 weights and optimizer moments (safetensors), and progress (JSON).

No random-generator state is saved: data order, dropout and initial weights are functions of the job's seed.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coserve.core.errors import CheckpointUnreadable, StorageError
from coserve.core.names import CHECKPOINT_STATE, CHECKPOINT_TENSORS
from coserve.core.training.jobs import JobSpec
from coserve.core.training.settings import Optimizer
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import BaseSpec, Wire
from coserve.core.validation import decode_json
from coserve.lora.store.tensor_writer import write_tensors
from coserve.state.durable import remove_dir, replace_dir, safetensors_errors, sweep
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder

log = logging.getLogger(__name__)


class TrainingProgress(Wire, frozen=True, forbid_unknown_fields=False):
    """Progress after the last optimizer step. With the optimizer's state it makes up a checkpoint. Fields that earlier
    versions wrote besides are ignored."""

    step: int = 0
    """Optimizer steps done."""
    trained_tokens: int = 0
    best_valid_loss: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    valid_loss_before: float | None = None
    """See `StepMetrics.valid_loss_before`."""
    pending: StepMetrics | None = None
    """Metrics of the last step while its evaluation is pending."""


class _State(Wire, frozen=True):
    """Content of `state.json`. Checkpoints of another job, base or optimizer are refused."""

    job: str
    base_fingerprint: str
    progress: TrainingProgress
    optimizer: Optimizer = Optimizer.ADAMW
    """The optimizer without its paging, which does not affect the files."""


def save_checkpoint(
    folder: DataFolder, spec: JobSpec, base: BaseSpec, progress: TrainingProgress, tensors: Mapping[str, Tensor]
) -> None:
    """Write a checkpoint; it is durable on return. Raises `StorageError`."""
    optimizer = spec.training.optimizer.unpaged
    state = _State(job=spec.id, base_fingerprint=base.fingerprint, progress=progress, optimizer=optimizer)
    with replace_dir(folder.checkpoint(spec.id, progress.step), point="checkpoint") as target:
        write_tensors(target / CHECKPOINT_TENSORS, tensors)
        (target / CHECKPOINT_STATE).write_bytes(msgspec.json.encode(state))


def load_checkpoint(path: Path, spec: JobSpec, base: BaseSpec) -> tuple[TrainingProgress, dict[str, Tensor]]:
    """Load a checkpoint; its tensors are on the CPU.

    Raises:
        CheckpointUnreadable: a file is missing, damaged, or of another job, base or optimizer.
        StorageError: the machine cannot read the files now.
    """
    try:
        with safetensors_errors(path / CHECKPOINT_TENSORS):
            failpoint("job.open")
            state = decode_json((path / CHECKPOINT_STATE).read_bytes(), _State)
            tensors: dict[str, Tensor] = load_file(path / CHECKPOINT_TENSORS)
    except FileNotFoundError as error:
        raise CheckpointUnreadable("a file of the checkpoint is missing") from error
    except (msgspec.DecodeError, SafetensorError) as error:
        raise CheckpointUnreadable("a file of the checkpoint is damaged") from error
    if (state.job, state.base_fingerprint) != (spec.id, base.fingerprint):
        raise CheckpointUnreadable("the checkpoint is of another job or base")
    if state.optimizer is not (expected := spec.training.optimizer.unpaged):
        raise CheckpointUnreadable(f"expected a checkpoint of {expected}, got one of {state.optimizer}")
    return state.progress, tensors


def prune(folder: DataFolder, job: str, keep: int, left_aside: Container[int]) -> None:
    """Delete all checkpoints but the last `keep`, and leftovers of earlier deletions. `left_aside`: steps of unusable
    checkpoints, which stay and do not count. Nothing may be written in the job's folder meanwhile. Failed deletions are
    logged, and tried again at the next call."""
    with _deletions(job):
        sweep(folder.job(job))
        usable = [path for step, path in folder.checkpoints(job) if step not in left_aside]
        for path in usable[:-keep]:
            with _deletions(job):
                remove_dir(path)


@contextmanager
def _deletions(job: str) -> Iterator[None]:
    """Log storage errors of deletions instead of raising them: the new checkpoint is already there."""
    try:
        yield
    except StorageError as error:
        log.warning("job %s: old checkpoints stay for now: %s", job, error.message)
