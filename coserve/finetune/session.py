"""A training session: one adapter and the verbs (forward and backward, optimizer step, ...) that training consists of.

A verb is a coroutine that is suspended at every micro-step, so that generation and other sessions run in between. It
yields the next work to do, an `Event`; a `TrainingPass` resumes it within slices. The code that awaits the verbs
decides what is learned, such as the steps of a job (`finetune.loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import coroutine

import torch
from torch import Tensor

from coserve.admission.optimizers import BEST, WEIGHTS, StateKind
from coserve.core.step_metrics import StepMetrics
from coserve.core.types import MicroStep
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.embedding_noise import EmbeddingNoise
from coserve.finetune.memory_limits import StepTreatment
from coserve.finetune.micro_batch import MicroBatch
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.model.dropout import DropoutSpec
from coserve.model.lora import LoraWeights


class Boundary(Enum):
    """End of a micro-batch within an optimizer step or evaluation: another job may run."""

    MICRO_BATCH = "micro_batch"


Event = MicroBatch | MicroStep | Boundary | StepMetrics
"""The event that a training coroutine suspends with: a micro-batch to compute, its own micro-step of this kind, a
`Boundary`, or the metrics of a finished optimizer step."""
Training = Coroutine[Event, Tensor | None, None]
"""A training coroutine. A `MicroBatch` is answered with its sums, fp64 (2), or (5) for DPO: see
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


@dataclass(frozen=True)
class Loss:
    """The loss that a forward sums over its targets: their negative log-likelihood, unless a field is set."""

    teacher: LoraWeights | None = None
    """Use the divergence from this adapter's distributions: this rank's shard, in the base's dtype."""
    beta: float | None = None
    """Use the DPO loss of pairs of rows, with this beta."""
    reference: LoraWeights | None = None
    """Reference adapter of a DPO loss, in the same form as `teacher`; None: the base."""

    @property
    def shares(self) -> bool:
        """Whether a forward may include rows of other sessions."""
        return self.teacher is None and self.beta is None

    @property
    def sums(self) -> int:
        """Number of sums of a forward: the loss and correct predictions, and for DPO three more
        (`losses.chunked.Preference`)."""
        return 2 if self.beta is None else 5


class TrainingSession:
    """One adapter in training: its weights, gradient sums and optimizer."""

    def __init__(
        self,
        optimizer: AdapterOptimizer,
        loss: Loss,
        *,
        seed: int,
        dropout: float,
        neftune_alpha: float | None,
        device: torch.device,
        timer: SliceTimer,
        check_peers: Callable[[], None] = lambda: None,
        overlapped: bool = False,
    ) -> None:
        """`check_peers` is called before results of collectives are committed; it raises if another rank has failed.
        `overlapped`: slices are only launched; device results are read in a separate micro-step
        (`MicroStep.RESULT`)."""
        self.optimizer, self.loss, self.timer, self.device = optimizer, loss, timer, device
        self._seed, self._dropout, self._alpha = seed, dropout, neftune_alpha
        self._check_peers, self._overlapped = check_peers, overlapped
        self._updating = False
        """Whether an update is unfinished: some weights may be new and others old."""

    # ---- verbs

    async def forward_backward(
        self, corpus: Corpus, rows: tuple[int, ...], tokens: int, how: StepTreatment, *, draw: int
    ) -> Tensor:
        """Add the gradients of these rows' summed loss to the sums; return the loss sums (fp64, (`loss.sums`)). Dropout
        and noise are functions of the seed and of `draw` (64 bits)."""
        seed, p, alpha = (self._seed << 96) | draw, self._dropout, self._alpha
        dropout = DropoutSpec(p, seed) if p > 0 else None
        noise = None if alpha is None else EmbeddingNoise(alpha, seed)
        return await self._computed(corpus, rows, tokens, how, learns=True, dropout=dropout, noise=noise)

    async def forward(self, corpus: Corpus, rows: tuple[int, ...], tokens: int, how: StepTreatment) -> Tensor:
        """Like `forward_backward`, without gradients, dropout and noise."""
        return await self._computed(corpus, rows, tokens, how, learns=False)

    async def divide_grads(self, denominator: int, sums: Tensor) -> tuple[float, list[float]]:
        """Divide the gradient sums by `denominator`. Returns their norm and the values of `sums`, in the step's only
        synchronisation."""
        await suspended(MicroStep.OPTIMIZER)
        norm = self.optimizer.divide_grads(denominator)
        norm_and_sums = await self.read(torch.cat((norm.double().view(1), sums)))
        self._check_peers()  # before the weights change
        return norm_and_sums[0], norm_and_sums[1:]

    async def optim_step(self, learning_rate: float, norm: float) -> None:
        """Update the weights with the divided gradients, whose norm is `norm`. Raises `FinishUpdate` at the end if it
        was thrown in."""
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
        corpus: Corpus,
        rows: tuple[int, ...],
        tokens: int,
        how: StepTreatment,
        *,
        learns: bool,
        dropout: DropoutSpec | None = None,
        noise: EmbeddingNoise | None = None,
    ) -> Tensor:
        sums = await suspended(
            MicroBatch(
                corpus,
                rows,
                tokens,
                self.optimizer.weights(),
                self.optimizer.trainable,
                self.optimizer.grads,
                learns=learns,
                dropout=dropout,
                noise=noise,
                teacher=self.loss.teacher,
                beta=self.loss.beta,
                reference=self.loss.reference,
                recomputed=how.recomputed,
                partly=how.partly,
                for_compiled=how.compiled,
            )
        )
        assert sums is not None, "expected the micro-batch's sums"
        return sums

    def zero_sums(self) -> Tensor:
        return torch.zeros(self.loss.sums, dtype=torch.float64, device=self.device)

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
        return self.optimizer.snapshot()

    def final_weights(self) -> Callable[[], LoraWeights]:
        """Begin to copy the fp32 result to the host: the weights of the last `keep_best`, or else the current ones.

        The returned function waits for the copy, on any thread, and returns the weights, valid until the next snapshot.
        """
        kind = BEST if self.optimizer.has_best else WEIGHTS
        return self._weights(kind, self.snapshot())

    def current_weights(self) -> Callable[[], LoraWeights]:
        """Like `final_weights`, for the weights after the last finished optimizer step."""
        self.check_weights()
        return self._weights(WEIGHTS, self.optimizer.snapshot(weights_only=True))

    def _weights(self, kind: StateKind, tensors: Callable[[], Mapping[str, Tensor]]) -> Callable[[], LoraWeights]:
        prefix = f"{kind.name}/"

        def weights() -> LoraWeights:
            found = tensors()
            return self.optimizer.adapter({n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)})

        return weights
