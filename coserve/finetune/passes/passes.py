"""All training passes of an engine: which jobs share one, and how failures are handled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from coserve.core.errors import CoserveError, EngineFault, JobOutOfMemory, failure_text
from coserve.core.link.jobs import JobFailed, JobNote, JobProgress
from coserve.core.link.link import FromEngine
from coserve.core.link.stats import TrainingBatches
from coserve.core.training.micro_step import MicroStep
from coserve.finetune.layers.graph_passes import CaptureFailed
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.memory_limits import BatchLimits, companions
from coserve.finetune.passes.training_pass import TrainingPass
from coserve.finetune.sessions.trainee import Trainee
from coserve.model.faults import contained, out_of_memory

log = logging.getLogger(__name__)

MakePass = Callable[[Sequence[Trainee]], TrainingPass]


class TrainingPasses:
    """At most one pass for each job. Several jobs share a forward only if all are dense or all have block-diagonal
    pairs: no kernels are compiled for both together."""

    def __init__(
        self, make: MakePass, limits: BatchLimits, *, mix_jobs: bool, graphs: LayerGraphs | None = None
    ) -> None:
        """`mix_jobs`: whether jobs share forwards, within `limits`. `graphs`: CUDA graphs of the passes' layers."""
        self._make, self._mix_jobs, self._graphs = make, mix_jobs, graphs
        self._configured = self._planned = limits
        self._oom_tokens: int | None = None
        """Most tokens of a shared forward since memory ran out; None: it has not."""
        self._passes: dict[str, TrainingPass] = {}
        """The current pass of each job that is in one."""
        self.batches = TrainingBatches()
        """Counts of the batches computed so far."""

    def __contains__(self, job: str) -> bool:
        return job in self._passes

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the operator."""
        if self._limits == self._planned:
            return ()
        return (f"jobs: not enough memory for larger batches of several jobs: at most {self._limits.tokens} tokens",)

    @property
    def _limits(self) -> BatchLimits:
        if self._oom_tokens is None:
            return self._planned
        return BatchLimits(min(self._oom_tokens, self._planned.tokens), self._planned.rows)

    def holds_memory_of(self, job: str) -> bool:
        """Whether a pass under way still uses the job's tensors, even if the job has left that pass."""
        return any(job == each.id for one in self._passes.values() for each in one.members)

    def next_micro_step(self, job: str) -> MicroStep:
        one = self._passes.get(job)
        return MicroStep.BEGIN if one is None else one.next_micro_step

    def pass_of(
        self, job: Trainee, others: Sequence[Trainee] = (), shared_tokens: int | None = None
    ) -> TrainingPass | None:
        """Return the job's current pass, or a new one of its next micro-batch. Micro-batches of `others`, in scheduling
        order, may join a new one while all together have at most `shared_tokens` tokens. None if the job has no
        work."""
        one = self._passes.get(job.id)
        if one is None and job.has_work:
            one = self._make([job, *self._companions(job, others, shared_tokens)])
            self._passes |= {each.id: one for each in one.jobs}
        return one

    def advance(self, one: TrainingPass, micro_steps: int | None) -> list[FromEngine]:
        """Run a slice (see `TrainingPass.advance`) and return the messages about it.

        A job that runs out of memory begins its optimizer step again with less. An error in a forward or backward of
        several jobs ends none of them: they begin their steps again, with fewer tokens at once or each alone. Raises
        errors other than `CoserveError` from the forward or backward of a single job.
        """
        failure: Exception | None = None
        try:
            with contained(one.device):
                one.advance(micro_steps)
        except EngineFault:
            raise
        except Exception as error:  # any kind: it ends the jobs of this pass alone
            known = isinstance(error, CoserveError | CaptureFailed) or out_of_memory(error)
            if len(one.members) == 1 and not known:
                raise
            failure, one.micro_steps_done = error.with_traceback(None), 0  # the traceback would hold tensors
        messages: list[FromEngine] = [JobProgress(id=job.id, metrics=metrics) for job, metrics in one.metrics]
        for job, own in one.errors:
            messages += self._failed(job, own)
        if failure is not None:
            messages += self._dissolved(one, failure)
        self.settle(one)
        return messages

    def settle(self, one: TrainingPass) -> None:
        """Update the counts after a slice, and remove the pass if it has ended."""
        if one.ended and one.learns:
            last = self.batches
            self.batches = TrainingBatches(last.count + 1, last.rows + one.rows, last.jobs + len(one.members))
        for job in one.jobs if one.ended else ():
            self._passes.pop(job.id, None)

    def abandon(self, job: Trainee, *, finish_update: bool = False) -> None:
        """Drop the job's unfinished optimizer step. Other jobs of its pass continue. `finish_update`: see
        `Trainer.abandon`."""
        if (one := self._passes.pop(job.id, None)) is not None:
            one.leave(job)
        job.abandon(finish_update=finish_update)

    def lower_memory(self, job: Trainee) -> list[FromEngine]:
        """Lower the job's memory after an out-of-memory; its step is abandoned. Empty if nothing is left to lower."""
        if not job.lower_memory():
            return []
        assert job.memory_note is not None, "expected what has changed"
        log.warning("job %s: %s", job.id, job.memory_note)
        return [JobNote(id=job.id, message=job.memory_note)]

    def limit(self, tokens: int | None) -> None:
        """Set the most tokens of shared forwards, lowered further if memory has run out; None: as configured."""
        self._planned = (
            self._configured
            if tokens is None
            else BatchLimits(min(tokens, self._configured.tokens), self._configured.rows)
        )

    def job_ended(self, *, last: bool) -> None:
        """A job ended. `last`: no job is left, so forget that memory ran out."""
        self._oom_tokens = None if last else self._oom_tokens
        if self._graphs is not None:
            self._graphs.job_ended(last=last)

    def release_memory(self) -> bool:
        """Free memory that passes do not need. Returns whether there was any."""
        return self._graphs is not None and self._graphs.release()

    def _companions(self, job: Trainee, others: Sequence[Trainee], shared_tokens: int | None) -> list[Trainee]:
        size, limits = job.shared_size, self._limits
        if shared_tokens is not None:
            limits = BatchLimits(min(limits.tokens, shared_tokens), limits.rows)
        if not self._mix_jobs or size is None:
            return []
        able = {
            other.id: other
            for other in others
            if other is not job and other.id not in self._passes and other.blocked == job.blocked
        }
        sizes = [(id, own) for id, other in able.items() if (own := other.shared_size) is not None]
        return [able[id] for id in companions(size, sizes, limits)]

    def _failed(self, job: Trainee, error: Exception) -> list[FromEngine]:
        """Handle an error that concerns only this job: it begins its optimizer step again with less memory, or
        fails."""
        message = job.memory_message(error) if out_of_memory(error) else None
        self.abandon(job)
        if message is not None:
            if notes := self.lower_memory(job):
                return notes
            error = JobOutOfMemory(message)
        if not isinstance(error, CoserveError):
            log.error("job %s: internal error", job.id, exc_info=error)
        code, text = failure_text(error)
        return [JobFailed(id=job.id, code=code, message=text)]

    def _dissolved(self, one: TrainingPass, error: Exception) -> list[FromEngine]:
        """Handle a failed forward or backward: the pass ends, and its jobs retry or fail."""
        if (out_of_memory(error) or isinstance(error, CaptureFailed)) and self.release_memory():
            for job in tuple(one.jobs):
                self.abandon(job)  # they begin their steps again
            return []
        if len(one.members) == 1:
            return self._failed(one.jobs[0], error)
        if out_of_memory(error):
            half = one.tokens // 2
            self._oom_tokens = half if self._oom_tokens is None else min(half, self._oom_tokens)
            log.warning(
                "jobs: not enough memory for %d tokens of several jobs: at most %d", one.tokens, self._oom_tokens
            )
        else:
            log.error("a batch of several jobs failed: each of them trains alone from now on", exc_info=error)
            for job in one.jobs:
                job.alone = True
        for job in tuple(one.jobs):
            self.abandon(job)
        return []
