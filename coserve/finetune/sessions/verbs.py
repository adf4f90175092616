"""The verbs of a `TrainingSession` as plain data, which rank 0 sends to the other ranks."""

from __future__ import annotations

from msgspec import Struct

from coserve.data.corpus.batch import Batch
from coserve.finetune.losses.loss import TokenLoss
from coserve.finetune.memory_limits import StepRecompute


class ForwardBackward(Struct, frozen=True, tag=True):
    """`TrainingSession.forward_backward`, or `forward` unless it `learns`."""

    batch: Batch
    tokens: TokenLoss | None
    """None: the loss of the session's job."""
    how: StepRecompute
    draw: int
    learns: bool


class OptimStep(Struct, frozen=True, tag=True):
    """`TrainingSession.optim_step`."""

    learning_rate: float
    denominator: int


class ZeroGrad(Struct, frozen=True, tag=True):
    """`TrainingSession.zero_grad`."""


class KeepBest(Struct, frozen=True, tag=True):
    """`TrainingSession.keep_best`."""


class Gather(Struct, frozen=True, tag=True):
    """`TrainingSession.snapshot`, or `current_weights` with `weights_only`."""

    weights_only: bool


Verb = ForwardBackward | OptimStep | ZeroGrad | KeepBest | Gather
