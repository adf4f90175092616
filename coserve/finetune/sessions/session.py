"""A training session: one adapter and the verbs (forward and backward, optimizer step, ...) that training consists of.

A verb is a coroutine that is suspended at every micro-step, so that generation and other sessions run in between. It
yields the next work to do, an `Event`; a `TrainingPass` resumes it within slices. The code that awaits the verbs
decides what is learned, such as the steps of a job (`finetune.loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import coroutine
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from coserve.admission.optimizers import BEST, WEIGHTS, StateKind
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.step_metrics import StepMetrics
from coserve.data.corpus.batch import Batch
from coserve.finetune.losses.loss import Loss, TokenLoss
from coserve.finetune.memory_limits import AS_CONFIGURED, StepRecompute
from coserve.finetune.micro_batch import MicroBatch
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import EmbeddingNoise
from coserve.model.dropout import DropoutSpec
from coserve.model.lora import LoraWeights


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


class Boundary(Enum):
    """End of a micro-batch within an optimizer step or evaluation: another job may run."""

    MICRO_BATCH = "micro_batch"


Event = MicroBatch | MicroStep | Boundary | StepMetrics
"""The event that a training coroutine suspends with: a micro-batch to compute, its own micro-step of this kind, a
`Boundary`, or the metrics of a finished optimizer step."""
Training = Coroutine[Event, Tensor | None, None]
"""A training coroutine. A `MicroBatch` is answered with its row of the result of
`MicroBatchRunner.forward_backward`."""


@coroutine
def suspended(event: Event) -> Generator[Event, Tensor | None, Tensor | None]:
    """Suspend the awaiting coroutine with `event`; return the answer."""
    return (yield event)


class FinishUpdate(Exception):
    """Thrown into a training coroutine to end it. If the weights are being updated, the update is completed first; then
    it is raised again."""


class SliceTimer:
    """Measures seconds spent in slices since the last `restart`; pauses between slices do not count."""

    def __init__(self, clock: Callable[[], float], *, overlapped: bool = False) -> None:
        """`overlapped`: slices are only launched, so the device works on between them, and pauses count."""
        self._clock, self._overlapped, self._before = clock, overlapped, 0.0
        self._began: float | None = None
        """Start of the current slice; None between slices."""

    @contextmanager
    def slice(self) -> Iterator[None]:
        if self._overlapped:
            yield
            return
        self._began = self._clock()
        try:
            yield
        finally:
            self._before, self._began = self.seconds(), None

    def restart(self) -> None:
        """Reset to zero. Call it inside a slice."""
        self._before, self._began = 0.0, self._clock()

    def seconds(self) -> float:
        return self._before + (0.0 if self._began is None else self._clock() - self._began)


class Computed(NamedTuple):
    """The result of a forward, on the device (fp64)."""

    sums: Tensor
    """The loss, and how many targets were predicted; for pairs also the sums of rewards (`Loss.sums`)."""
    log_probs: Tensor
    """With a token loss: the log-probability (nats) of each target, or of each of its candidates, flat."""


class TrainingSession:
    """One adapter in training: its weights, gradient sums and optimizer."""

    def __init__(
        self,
        optimizer: AdapterOptimizer,
        *,
        seed: int,
        dropout: float,
        neftune_alpha: float | None,
        device: torch.device,
        timer: SliceTimer,
        check_peers: Callable[[], None] = lambda: None,
        announce: Callable[[Verb], None] = lambda _: None,
        overlapped: bool = False,
    ) -> None:
        """`check_peers` is called before results of collectives are committed; it raises if another rank has failed.
        `announce` is called when a verb begins, before its first micro-step: other ranks run it too. `overlapped`:
        slices are only launched; device results are read in a separate micro-step (`MicroStep.RESULT`)."""
        self.optimizer, self.timer, self.device = optimizer, timer, device
        self._seed, self._dropout, self._alpha = seed, dropout, neftune_alpha
        self._check_peers, self._announce, self._overlapped = check_peers, announce, overlapped
        self._updating = False
        """Whether an update is unfinished: some weights may be new and others old."""
        self.updates = 0
        """Updates of the weights that have begun."""

    # ---- verbs

    async def forward_backward(
        self, batch: Batch, loss: Loss, how: StepRecompute = AS_CONFIGURED, *, draw: int = 0
    ) -> Computed:
        """Add the gradients of the batch's summed loss to the sums. Dropout and noise are functions of the seed and of
        `draw` (64 bits)."""
        self._announce(ForwardBackward(batch, loss.tokens, how, draw, learns=True))
        seed, p, alpha = (self._seed << 96) | draw, self._dropout, self._alpha
        dropout = DropoutSpec(p, seed) if p > 0 else None
        noise = None if alpha is None else EmbeddingNoise(alpha, seed)
        return await self._computed(batch, loss, how, learns=True, dropout=dropout, noise=noise)

    async def forward(self, batch: Batch, loss: Loss, how: StepRecompute = AS_CONFIGURED) -> Computed:
        """Like `forward_backward`, without gradients, dropout and noise."""
        self._announce(ForwardBackward(batch, loss.tokens, how, 0, learns=False))
        return await self._computed(batch, loss, how, learns=False)

    async def optim_step(
        self,
        learning_rate: float,
        denominator: int = 1,
        sums: Tensor | None = None,
        accept: Callable[[float, list[float]], None] = lambda norm, sums: None,
    ) -> None:
        """Update the weights with the gradient sums, divided by `denominator`; the sums are then zero.

        `accept` is called with the gradients' norm and the values of `sums` before the weights change; it may raise.
        Both are read in the step's only synchronisation. Raises `NonFiniteLoss` for a norm that is not finite, and
        `FinishUpdate` at the end if it was thrown in.
        """
        self._announce(OptimStep(learning_rate, denominator))
        await suspended(MicroStep.OPTIMIZER)
        own = self.optimizer.divide_grads(denominator).double().view(1)
        norm, *values = await self.read(own if sums is None else torch.cat((own, sums)))
        self._check_peers()  # before the weights change
        accept(norm, values)
        self.updates += 1
        slices, finish = self.optimizer.slices(norm, learning_rate), None
        self._updating = True
        for _ in slices:
            try:
                if finish is None:
                    await suspended(MicroStep.OPTIMIZER)
            except FinishUpdate as thrown:
                finish = thrown
        self._updating = False
        if finish is not None:
            raise finish

    def zero_grad(self) -> None:
        """Forget gradients of a step that was not finished."""
        self._announce(ZeroGrad())
        self.optimizer.zero_grad()

    def keep_best(self) -> None:
        self._announce(KeepBest())
        self.optimizer.keep_best()

    async def next_micro_batch(self) -> None:
        """Let other jobs run between two micro-batches."""
        await suspended(Boundary.MICRO_BATCH)

    async def read(self, values: Tensor) -> list[float]:
        """Read a device tensor. The host waits for it, unless slices are only launched: then it is read in a later
        slice."""
        if self._overlapped:
            await suspended(MicroStep.RESULT)
        found: list[float] = values.tolist()
        return found

    async def _computed(
        self,
        batch: Batch,
        loss: Loss,
        how: StepRecompute,
        *,
        learns: bool,
        dropout: DropoutSpec | None = None,
        noise: EmbeddingNoise | None = None,
    ) -> Computed:
        def prepare() -> None:
            self.optimizer.compute_scales()
            loss.prepare()

        found = await suspended(
            MicroBatch(
                batch,
                loss,
                self.optimizer.weights(),
                self.optimizer.trainable,
                self.optimizer.grads,
                how,
                learns=learns,
                prepare=prepare,
                dropout=dropout,
                noise=noise,
            )
        )
        assert found is not None, "expected the micro-batch's result"
        return Computed(found[: loss.sums], found[loss.sums :])

    # ---- its state

    def check_weights(self) -> None:
        """Raise `RuntimeError` if an update of the weights failed or was dropped midway: they then belong to no
        step."""
        if self._updating:
            raise RuntimeError("an update was not finished: its weights are lost")

    def snapshot(self) -> Callable[[], Mapping[str, Tensor]]:
        """Begin to copy the state that training resumes from (`AdapterOptimizer.snapshot`). Raises like
        `check_weights`."""
        self.check_weights()
        return self._snapshot(weights_only=False)

    def final_weights(self) -> Callable[[], LoraWeights]:
        """Begin to copy the fp32 result to the host: the weights of the last `keep_best`, or else the current ones.

        The returned function waits for the copy, on any thread, and returns the weights, valid until the next snapshot.
        """
        kind = BEST if self.optimizer.has_best else WEIGHTS
        return self._weights(kind, self.snapshot())

    def current_weights(self) -> Callable[[], LoraWeights]:
        """Like `final_weights`, for the weights after the last finished optimizer step."""
        self.check_weights()
        return self._weights(WEIGHTS, self._snapshot(weights_only=True))

    def _snapshot(self, *, weights_only: bool) -> Callable[[], Mapping[str, Tensor]]:
        self._announce(Gather(weights_only))
        return self.optimizer.snapshot(weights_only=weights_only)

    def _weights(self, kind: StateKind, tensors: Callable[[], Mapping[str, Tensor]]) -> Callable[[], LoraWeights]:
        return lambda: self.optimizer.adapter(tensors(), kind)
