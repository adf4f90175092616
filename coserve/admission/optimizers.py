"""What each optimizer keeps for an adapter, and where it runs. No torch, and no library is imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from coserve.errors import InvalidRequest
from coserve.types import Optimizer

ALIGNED = 64
"""Elements: in a flat buffer every tensor starts at a multiple of it, so that kernels read whole cache lines in any dtype of two bytes
or more."""
QUANTIZED = 256
"""Elements that share one scale in an 8-bit moment: bitsandbytes' block-wise quantization (Dettmers et al. 2022, section 2.1)."""
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
_MOMENTS = {
    Optimizer.ADAMW: (_EXP_AVG, _EXP_AVG_SQ),
    Optimizer.ADAMW_8BIT: (*_EXP_AVG_8, *_EXP_AVG_SQ_8),
    Optimizer.LION: (_EXP_AVG,),
    Optimizer.LION_8BIT: _EXP_AVG_8,
}


def state_kinds(optimizer: Optimizer, *, early_stopping: bool) -> tuple[StateKind, ...]:
    """The rows of a job's state, in their order."""
    return (WEIGHTS, *_MOMENTS[optimizer], *((BEST,) if early_stopping else ()))


def aligned(optimizer: Optimizer) -> int:
    """Elements: every tensor starts at a multiple of it. Two tensors never share the scale of a quantized moment."""
    return QUANTIZED if optimizer.eight_bit else ALIGNED


def check_optimizer(optimizer: Optimizer, *, ranks: int) -> None:
    """Raises `InvalidRequest` for an optimizer that cannot run here. `ranks`: GPUs that share the base."""
    if not optimizer.eight_bit:
        return
    field, plain = "training.optimizer", str(optimizer).removesuffix("_8bit")
    if ranks > 1:
        raise InvalidRequest(f"{optimizer} is not supported with --tp {ranks}: use {plain}", field=field)
    if find_spec("bitsandbytes") is None:
        raise InvalidRequest(
            f"{optimizer} needs bitsandbytes, which is not installed: pip install 'coserve[bitsandbytes]'", field=field
        )
