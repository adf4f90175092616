"""Checkpoint files of a job, and saved states of clients' sessions: fp32 weights and optimizer moments (safetensors),
and progress, or base and LoRA settings (JSON).

No random-generator state is saved: data order, dropout and initial weights are functions of the job's seed.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coserve.admission.optimizers import WEIGHTS
from coserve.core.errors import CheckpointUnreadable, InvalidRequest, StorageError
from coserve.core.names import CHECKPOINT_STATE, CHECKPOINT_TENSORS
from coserve.core.training.jobs import JobSpec
from coserve.core.training.schemas import SaveState, SessionSpec
from coserve.core.training.settings import Optimizer
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import BaseSpec, Wire
from coserve.core.validation import decode_json
from coserve.finetune.lora_tensors import refuse_non_finite
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.lora.store.tensor_writer import write_tensors
from coserve.state.durable import remove_dir, replace_dir, safetensors_errors, sweep
from coserve.state.failpoints import failpoint
from coserve.state.folder import DataFolder
from coserve.state.session_states import SessionState, read_state, write_state

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


def save_state(
    folder: DataFolder, call: SaveState, spec: SessionSpec, base: BaseSpec, step: int, tensors: Mapping[str, Tensor]
) -> None:
    """Write a state; it is durable on return. Raises `NonFiniteLoss`, `StorageError`."""
    weights = (tensors[name] for name in tensors if name.startswith(f"{WEIGHTS.name}/"))
    refuse_non_finite(weights, torch.float32)
    state = SessionState(
        base=base.name,
        base_fingerprint=base.fingerprint,
        lora=spec.lora,
        seed=spec.training.seed,
        step=step,
        project=call.project,
    )
    with replace_dir(folder.session_state(call.run, call.name), point="checkpoint") as target:
        write_tensors(target / CHECKPOINT_TENSORS, tensors)
        write_state(target / CHECKPOINT_STATE, state)


def load_state(folder: DataFolder, spec: SessionSpec, base: BaseSpec, optimizer: AdapterOptimizer) -> int:
    """Load the state that `spec` names into the optimizer; return the number of optimizer steps done. Without
    `with_optimizer` the moments and the step count are zero.

    Raises `NotFound`, `InvalidRequest` for a state of another base or shape, `CheckpointUnreadable`, `StorageError`.
    """
    assert spec.state is not None, "expected the name of a state"
    state = read_state(folder, *spec.state)
    if state.base_fingerprint != base.fingerprint:
        raise InvalidRequest(f"expected a state of {base.name}, got one of {state.base}", field="path")
    path = folder.session_state(*spec.state) / CHECKPOINT_TENSORS
    try:
        with safetensors_errors(path):
            tensors: dict[str, Tensor] = load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointUnreadable("a file of the saved state is damaged") from error
    steps = state.step if spec.with_optimizer else 0
    if not spec.with_optimizer:
        weights = f"{WEIGHTS.name}/"
        tensors = {
            name: own if name.startswith(weights) else own.new_zeros(()).expand(own.shape)
            for name, own in tensors.items()
        }
    optimizer.restore(tensors, steps=steps)
    return steps
