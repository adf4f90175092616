"""State that each optimizer keeps for an adapter, and where it can run. No torch; no optimizer library is imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from coserve.core.errors import InvalidRequest
from coserve.core.training.settings import Optimizer

ALIGNED = 64
"""Elements. Every tensor in a flat buffer starts at a multiple of it, so kernels read whole cache lines in any dtype of
two bytes or more."""
QUANTIZED = 256
"""Elements that share one scale in an 8-bit moment: bitsandbytes' block-wise quantization (Dettmers et al. 2022,
section 2.1)."""
CODES = 256
"""Values that an 8-bit code can have: entries of each moment's fp32 table."""


@dataclass(frozen=True)
class StateKind:
    """One kind of tensors of an optimizer's state, such as a moment. `name`: the name of its tensors in checkpoints."""

    name: str
    itemsize: int = 4
    """Bytes of an element: 4 for fp32, 1 for uint8."""
    per: int = 1
    """Number of weights per element."""
    zero: int = 0
    """Element that encodes 0."""


WEIGHTS = StateKind("weights")
"""First row: the fp32 master weights."""
BEST = StateKind("best")
"""Last row, with early stopping only: the weights of the best evaluation."""
_EXP_AVG, _EXP_AVG_SQ = StateKind("exp_avg"), StateKind("exp_avg_sq")
_EXP_AVG_8 = (StateKind("exp_avg", itemsize=1, zero=127), StateKind("exp_avg_absmax", per=QUANTIZED))
_EXP_AVG_SQ_8 = (StateKind("exp_avg_sq", itemsize=1), StateKind("exp_avg_sq_absmax", per=QUANTIZED))
PIECE = 1 << 20
"""Weights whose paged moments are copied to the GPU together: 8 MiB of moments with AdamW."""
BUFFERS = 3
"""Pieces on the GPU at a time: one being copied in, one updated, one copied out."""
SLICE = 8
"""Pieces of paged moments updated in one micro-step: with AdamW 64 MiB, copied in 3 ms each way at 25 GB/s."""
COPIES = 2
"""Copies of paged moments in host memory: the last update's, and one for a checkpoint being written or for the next
update."""
_MOMENTS = {
    Optimizer.ADAMW: (_EXP_AVG, _EXP_AVG_SQ),
    Optimizer.ADAMW_8BIT: (*_EXP_AVG_8, *_EXP_AVG_SQ_8),
    Optimizer.LION: (_EXP_AVG,),
    Optimizer.LION_8BIT: _EXP_AVG_8,
}


def state_kinds(optimizer: Optimizer, *, early_stopping: bool) -> tuple[StateKind, ...]:
    """Rows of a job's optimizer state, in order."""
    return (WEIGHTS, *_MOMENTS[optimizer.unpaged], *((BEST,) if early_stopping else ()))


def paged_kinds(optimizer: Optimizer) -> tuple[StateKind, ...]:
    """Rows of `state_kinds` that stay in host memory."""
    return _MOMENTS[optimizer.unpaged] if optimizer.paged else ()


def aligned(optimizer: Optimizer) -> int:
    """Alignment of tensors in elements. Two tensors never share the scale of a quantized moment."""
    return QUANTIZED if optimizer.eight_bit else ALIGNED


def check_optimizer(optimizer: Optimizer, *, ranks: int) -> None:
    """Raise `InvalidRequest` for an optimizer that cannot run here. `ranks`: GPUs that share the base."""
    field, plain = "training.optimizer", str(optimizer.unpaged).removesuffix("_8bit")
    if ranks > 1 and optimizer != plain:
        raise InvalidRequest(f"{optimizer} is not supported with --tp {ranks}: use {plain}", field=field)
    if optimizer.eight_bit and find_spec("bitsandbytes") is None:
        raise InvalidRequest(
            f"{optimizer} needs bitsandbytes, which is not installed: pip install 'coserve[bitsandbytes]'", field=field
        )
