"""Sessions of a follower rank: they run the verbs that rank 0's sessions announce."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, assert_never

from coserve.core.cancellation import Cancellation
from coserve.core.training.jobs import JobSpec
from coserve.finetune.job_checkpoint import load_last
from coserve.finetune.losses.loss import Loss
from coserve.finetune.publication import served_copy
from coserve.finetune.sessions.session import (
    ForwardBackward,
    Gather,
    KeepBest,
    OptimStep,
    TrainingSession,
    Verb,
    ZeroGrad,
)
from coserve.finetune.sessions.sessions import Sessions
from coserve.finetune.sessions.trainee import Trainee
from coserve.model.lora import LoraWeights


class Followed(Trainee):
    """A follower rank's session: runs the verbs that rank 0 sends."""

    def __init__(self, id: str, session: TrainingSession, loss: Loss) -> None:
        super().__init__(id, session)
        self._loss, self._tokens = loss, 0
        self.gathered: Callable[[], LoraWeights] | None = None
        """The last gathered weights."""

    @property
    def tokens_in_progress(self) -> int:
        return self._tokens

    def run(self, verb: Verb) -> None:
        """Run a verb; `ForwardBackward` and `OptimStep` only begin, and slices run them."""
        session = self.session
        match verb:
            case ForwardBackward():
                self._tokens = verb.batch.tokens
                self.begin(self._compute(verb))
            case OptimStep(learning_rate, denominator):
                self._tokens = 0
                self.begin(session.optim_step(learning_rate, denominator))
            case ZeroGrad():
                session.zero_grad()
            case KeepBest():
                session.keep_best()
            case Gather(weights_only):
                self.gathered = session.current_weights() if weights_only else session.final_weights()
            case _:
                assert_never(verb)

    async def _compute(self, verb: ForwardBackward) -> None:
        loss = self._loss if verb.tokens is None else Loss(tokens=verb.tokens)
        if verb.learns:
            await self.session.forward_backward(verb.batch, loss, verb.how, draw=verb.draw)
        else:
            await self.session.forward(verb.batch, loss, verb.how)


class LoadedSession(NamedTuple):
    """A loaded session that is not registered yet."""

    step: int
    """Optimizer steps done."""
    commit: Callable[[], None]


class FollowedSessions(Sessions[Followed]):
    """All sessions of a follower rank."""

    def load(self, spec: JobSpec, cancellation: Cancellation) -> LoadedSession:
        """Load a session from its job's last readable checkpoint; on any thread. Raises as `Trainer.load`."""
        with self._job_errors():
            session, loss = self._session(spec)
            cancellation.check()
            last = load_last(self._folder, spec, self._base.spec, session.optimizer).progress

        def commit() -> None:
            assert spec.id not in self._jobs, f"job {spec.id} runs already"
            self._jobs[spec.id] = Followed(spec.id, session, loss)

        return LoadedSession(0 if last is None else last.step, commit)

    def run(self, job: str, verb: Verb) -> None:
        self._jobs[job].run(verb)

    def abandon(self, job: str) -> None:
        """Drop the unfinished verb and its memory."""
        with self._job_errors():
            self._passes.abandon(self._jobs[job])

    def gathered_copy(self, job: str) -> Callable[[], LoraWeights | None]:
        """Return a function that makes, on a worker thread, this rank's own copy of the last gathered weights, for
        requests; its result is None if there is no memory."""
        weights = self._jobs[job].gathered
        assert weights is not None, "expected `Gather` first"
        return lambda: served_copy(weights(), self._base, self._store)
