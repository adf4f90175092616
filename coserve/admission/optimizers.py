"""What each optimizer keeps for an adapter, and where it runs. No torch, and no library is imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from coserve.core.errors import InvalidRequest
from coserve.core.types import Optimizer

ALIGNED = 64
"""Elements: in a flat buffer every tensor starts at a multiple of it, so that kernels read whole cache lines in any
dtype of two bytes or more."""
QUANTIZED = 256
"""Elements that share one scale in an 8-bit moment: bitsandbytes' block-wise quantization (Dettmers et al. 2022,
section 2.1)."""
CODES = 256
"""Numbers that 8 bits stand for: an fp32 table for each moment."""


@dataclass(frozen=True)
class StateKind:
    """A row of an optimizer's state: `name` is also its tensors' in checkpoints."""

    name: str
    itemsize: int = 4
    """Bytes of an element: of fp32, or of uint8."""
    per: int = 1
    """Weights that share one element."""
    zero: int = 0
    """The element that stands for 0."""


WEIGHTS = StateKind("weights")
"""The first kind: the fp32 master weights."""
BEST = StateKind("best")
"""The last kind, of jobs with early stopping: the weights of the best evaluation."""
_EXP_AVG, _EXP_AVG_SQ = StateKind("exp_avg"), StateKind("exp_avg_sq")
_EXP_AVG_8 = (StateKind("exp_avg", itemsize=1, zero=127), StateKind("exp_avg_absmax", per=QUANTIZED))
_EXP_AVG_SQ_8 = (StateKind("exp_avg_sq", itemsize=1), StateKind("exp_avg_sq_absmax", per=QUANTIZED))
PIECE = 1 << 20
"""Weights whose moments pass through the GPU together, where these are paged: 8 MiB of AdamW's."""
BUFFERS = 3
"""Pieces on the GPU at a time: one comes, one is updated, one goes."""
SLICE = 8
"""Pieces that are updated without interruption: 64 MiB of AdamW's come, and go, in 3 ms each at 25 GB/s."""
COPIES = 2
"""Paged moments in host memory: those of the last update, and those that a checkpoint being written holds, or that the
next update writes."""
_MOMENTS = {
    Optimizer.ADAMW: (_EXP_AVG, _EXP_AVG_SQ),
    Optimizer.ADAMW_8BIT: (*_EXP_AVG_8, *_EXP_AVG_SQ_8),
    Optimizer.LION: (_EXP_AVG,),
    Optimizer.LION_8BIT: _EXP_AVG_8,
}


def state_kinds(optimizer: Optimizer, *, early_stopping: bool) -> tuple[StateKind, ...]:
    """The rows of a job's state, in their order."""
    return (WEIGHTS, *_MOMENTS[optimizer.unpaged], *((BEST,) if early_stopping else ()))


def paged_kinds(optimizer: Optimizer) -> tuple[StateKind, ...]:
    """Those of `state_kinds` that stay in host memory."""
    return _MOMENTS[optimizer.unpaged] if optimizer.paged else ()


def aligned(optimizer: Optimizer) -> int:
    """Elements: every tensor starts at a multiple of it. Two tensors never share the scale of a quantized moment."""
    return QUANTIZED if optimizer.eight_bit else ALIGNED


def check_optimizer(optimizer: Optimizer, *, ranks: int) -> None:
    """Raises `InvalidRequest` for an optimizer that cannot run here. `ranks`: GPUs that share the base."""
    field, plain = "training.optimizer", str(optimizer.unpaged).removesuffix("_8bit")
    if ranks > 1 and optimizer != plain:
        raise InvalidRequest(f"{optimizer} is not supported with --tp {ranks}: use {plain}", field=field)
    if optimizer.eight_bit and find_spec("bitsandbytes") is None:
        raise InvalidRequest(
            f"{optimizer} needs bitsandbytes, which is not installed: pip install 'coserve[bitsandbytes]'", field=field
        )
