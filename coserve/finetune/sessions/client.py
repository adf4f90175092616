"""A session whose next verb comes from a client, and the checks of its calls."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from coserve.core.errors import CoserveError, InvalidRequest, NonFiniteLoss
from coserve.core.training.schemas import Compute, OptimStepRequest, SessionSpec
from coserve.data.corpus.batch import Batch, Example, examples_in
from coserve.data.corpus.batch_plan import pack
from coserve.finetune.losses.loss import Cispo, CrossEntropy, Dro, Gspo, ImportanceSampling, Loss, Ppo, TokenLoss
from coserve.finetune.memory_limits import AS_CONFIGURED, BatchLimits, MemoryLimits, MicroBatches
from coserve.finetune.sessions.session import Event, TrainingSession
from coserve.finetune.sessions.trainee import Trainee

LOSSES: dict[str, type[TokenLoss]] = {
    "cross_entropy": CrossEntropy,
    "importance_sampling": ImportanceSampling,
    "ppo": Ppo,
    "cispo": Cispo,
    "dro": Dro,
    "gspo": Gspo,
}
"""Losses by the Tinker SDK's names."""
RENAMED = {"clip_low_threshold": "low", "clip_high_threshold": "high"}
"""Fields of losses by the SDK's names."""


@dataclass(frozen=True)
class Work:
    """A forward, and a backward if it `learns`."""

    examples: tuple[Example, ...]
    loss: Loss
    learns: bool
    micro_batches: MicroBatches
    """Indices of examples, within the engine's limits."""


def work_of(call: Compute, vocab: int, limits: BatchLimits) -> Work:
    """Check a call, on any thread: it may have thousands of examples. Raises `InvalidRequest`."""
    loss, examples = Loss(tokens=_loss(call.loss, call.config)), examples_in(call.batch)
    if not examples:
        raise InvalidRequest("expected at least one example", field="data")
    for number, example in enumerate(examples):
        try:
            loss.check(Batch((example,)), vocab)
        except InvalidRequest as error:
            raise InvalidRequest(f"example {number}: {error.message}", field="data") from None
        if (length := len(example.tokens_N)) > limits.tokens:
            raise InvalidRequest(
                f"example {number}: expected at most {limits.tokens} tokens (--micro-batch-tokens), got {length}",
                field="data",
            )
    if len({example.labels_K.shape[1:] for example in examples}) > 1:
        raise InvalidRequest("expected equally many candidates for the targets of all examples", field="data")
    lengths = [len(example.tokens_N) for example in examples]
    packed = pack(lengths, limits.tokens, rows=limits.rows)
    return Work(examples, loss, call.learns, [tuple(rows) for rows in packed])


def _loss(name: str, config: dict[str, float]) -> TokenLoss:
    kind = LOSSES.get(name)
    if kind is None:
        raise InvalidRequest(f"expected one of {', '.join(LOSSES)}, got {name!r}", field="loss_fn")
    known = {field for field in (*RENAMED, "beta") if RENAMED.get(field, field) in kind.__struct_fields__}
    if unknown := config.keys() - known:
        raise InvalidRequest(f"{name} has no {', '.join(sorted(unknown))}", field="loss_fn_config")
    if not np.isfinite([*config.values(), 0.0]).all():
        raise InvalidRequest("expected finite numbers", field="loss_fn_config")
    return msgspec.convert({"type": kind.__name__} | {RENAMED.get(key, key): own for key, own in config.items()}, kind)


@dataclass(frozen=True)
class Result:
    """Result of a call: see `core.training.schemas.Compute`."""

    values: bytes
    metrics: dict[str, float]


class ClientTrainee(Trainee):
    """Computes one call at a time. If a forward or backward is abandoned, for lack of memory, the gradients of all
    calls since the last optimizer step are computed again, with less."""

    def __init__(self, spec: SessionSpec, session: TrainingSession, step: int) -> None:
        """`step`: optimizer steps done."""
        super().__init__(spec.id, session)
        self.spec, self.step = spec, step
        self.limits = MemoryLimits(np.zeros(0, np.int64), len(session.optimizer.trainable))
        self.outcome: Result | CoserveError | None = Result(b"", {})
        """How the last call ended; None while one is being computed."""
        self._call: Work | OptimStepRequest | None = None
        self._summed: list[Work] = []
        """Calls since the last optimizer step whose gradients are in the sums."""
        self._complete = True
        """Whether the sums have the gradients of all of `_summed`."""
        self._missing = False
        """Whether the next optimizer step lacks the gradients of a call that failed."""
        self._recompute_plan, self._rows = AS_CONFIGURED, tuple[int, ...]()

    def begin_call(self, call: Work | OptimStepRequest) -> None:
        """Make `call` the one that the next training passes compute."""
        assert self._call is None, f"session {self.id} computes a call already"
        self._call, self.outcome = call, None

    def refused(self) -> None:
        """Note that a call with gradients was refused, so that the next optimizer step is refused too."""
        self._missing = True

    @property
    def has_work(self) -> bool:
        return self._call is not None

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self.memory_note is None else (self.memory_note,)

    @property
    def tokens_in_progress(self) -> int:
        return self.limits.size(self._rows)

    @property
    def next_tokens(self) -> int:
        """Most tokens of the next micro-batch, as far as known."""
        lengths = self.limits.lengths if isinstance(self._call, Work) else ()
        return max(self.batch_tokens, *lengths) if len(lengths) else 0

    def go_on(self, sums: Tensor | None = None) -> Event:
        if self._training is None:
            self.begin(self._run())
        return super().go_on(sums)

    def lower_memory(self) -> bool:
        note = self.limits.lower(self._rows, self._recompute_plan.recomputed) if len(self._rows) else None
        self.memory_note = note or self.memory_note
        return note is not None

    async def _run(self) -> None:
        call = self._call
        assert call is not None, "expected a call"
        self.session.check_weights()
        try:
            self.outcome = await (self._step(call) if isinstance(call, OptimStepRequest) else self._compute(call))
        except CoserveError as error:
            self.outcome = error
        self._call, self._rows = None, ()

    async def _compute(self, call: Work) -> Result:
        if call.learns:
            if not self._complete:
                self.session.zero_grad()
                for earlier in self._summed:
                    await self._forward(earlier)
                    await self.session.next_micro_batch()
            self._complete = False
        result = await self._forward(call)
        if call.learns:
            self._summed.append(call)
            self._complete = True
        return result

    async def _forward(self, call: Work) -> Result:
        session, limits = self.session, self.limits
        limits.lengths = np.array([len(example.tokens_N) for example in call.examples])
        self._recompute_plan = limits.recompute_plan
        ends = np.cumsum([example.labels_K.size for example in call.examples])
        sums = torch.zeros(call.loss.sums, dtype=torch.float64, device=session.device)
        found, order = list[Tensor](), list[int]()
        for number, self._rows in enumerate(limits.cut(call.micro_batches)):
            if number:
                await session.next_micro_batch()
            batch = Batch(tuple([call.examples[row] for row in self._rows]))
            verb = session.forward_backward if call.learns else session.forward
            computed = await verb(batch, call.loss, self._recompute_plan)
            sums += computed.sums
            found.append(computed.log_probs)
            order += self._rows
        self._rows = ()
        read = np.array(await session.read(torch.cat((sums, *found))))
        values, at = np.empty(int(ends[-1]), np.float32), call.loss.sums
        for row in order:
            size = call.examples[row].labels_K.size
            values[ends[row] - size : ends[row]] = read[at : at + size]
            at += size
        return Result(values.tobytes(), {"loss:sum": float(read[0])})

    async def _step(self, adam: OptimStepRequest) -> Result:
        session, norms = self.session, list[float]()
        if self._missing or not self._complete:
            self._forget()
            raise InvalidRequest(
                "a forward_backward since the last optim_step failed: the gradients of that step are dropped"
            )

        def accept(norm: float, _: list[float]) -> None:
            if not math.isfinite(norm):
                raise NonFiniteLoss("the norm of the gradients is not finite: they are dropped; try a lower rate")
            norms.append(norm)

        session.optimizer.configure(adam)
        try:
            await session.optim_step(adam.learning_rate, accept=accept)
        except NonFiniteLoss:
            self._forget()
            raise
        self.step += 1
        self._summed.clear()
        return Result(b"", {"grad_norm": norms[0], "step": float(self.step)})

    def _forget(self) -> None:
        """Drop the gradients of the step that was begun."""
        self.session.zero_grad()
        self._summed.clear()
        self._missing, self._complete = False, True
