"""Saved states of clients' sessions: fp32 weights and moments (safetensors), and their base and LoRA settings
(JSON)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coserve.admission.optimizers import WEIGHTS
from coserve.core.errors import CheckpointUnreadable, InvalidRequest
from coserve.core.names import CHECKPOINT_STATE, CHECKPOINT_TENSORS
from coserve.core.training.calls import SaveState, SessionSpec
from coserve.core.types import BaseSpec
from coserve.finetune.lora_tensors import refuse_non_finite
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.lora.store.tensor_writer import write_tensors
from coserve.state.durable import replace_dir, safetensors_errors
from coserve.state.folder import DataFolder
from coserve.state.session_states import SessionState, read_state, write_state


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
