"""Which jobs fit into the memory for jobs at the same time, and how each of them trains there. Pure: no torch, no IO,
no clock.

Every job keeps its state between micro-batches. Activations are those of one micro-batch at a time: the ledger counts
those of the job that takes most alone; a micro-batch that jobs share is bounded beside it
(`MemoryAdmission.shared_tokens`). A job starts if its state fits beside that of the others, and its micro-batches, in
some treatment, fit beside all states, without a change for the others. When memory comes back, each job gets the
fastest treatment that fits again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coserve.admission.treatment import JobMemory, Option


@dataclass(frozen=True)
class Shortage:
    """Why a job cannot start now. Bytes."""

    needed: int
    """At least, with what the jobs that have started need."""
    limit: int
    """For all jobs, now."""
    never: bool
    """It does not fit alone either, whatever other processes give back."""


@dataclass
class _Admitted:
    memory: JobMemory
    option: Option


@dataclass
class Ledger:
    """`planned`: bytes for jobs; `limit`: how many of them are there now."""

    planned: int
    limit: int = 0
    version: int = 0
    """Counts changes of what `admit` depends on."""
    _jobs: dict[str, _Admitted] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limit = self.limit or self.planned

    @property
    def states(self) -> int:
        """Bytes that the jobs keep between micro-batches."""
        return sum(job.memory.state.total for job in self._jobs.values())

    @property
    def activations(self) -> int:
        """The most that one of them takes besides."""
        return max((job.option.activations for job in self._jobs.values()), default=0)

    def admit(self, job: str, memory: JobMemory) -> Option | Shortage:
        """Start a job, in the fastest treatment that fits, or say what is missing."""
        assert job not in self._jobs, f"job {job} was admitted before"
        states = self.states + memory.state.total
        option = memory.best(self.limit - states)
        if option is None or states + self.activations > self.limit:
            least = memory.options[-1].activations
            return Shortage(states + max(least, self.activations), self.limit, never=memory.least > self.planned)
        self._jobs[job] = _Admitted(memory, option)
        self.version += 1
        return option

    def release(self, job: str) -> None:
        """The job has ended, or was paused. Nothing happens for one that was not admitted."""
        if self._jobs.pop(job, None) is not None:
            self.version += 1

    def resize(self, limit: int) -> None:
        """As many bytes are there now."""
        limit = min(limit, self.planned)
        if limit != self.limit:
            self.limit, self.version = limit, self.version + 1

    def replan(self, memories: Mapping[str, JobMemory]) -> None:
        """Jobs need something else from now on, which `refit` gives them."""
        for id, memory in memories.items():
            self._jobs[id].memory = memory
        self.version += 1

    def refit(self) -> dict[str, Option]:
        """Give each job the fastest treatment that fits, or if none does the smallest; returns those that changed."""
        left, changed = self.limit - self.states, dict[str, Option]()
        for id, job in self._jobs.items():
            option = job.memory.best(left) or job.memory.options[-1]
            if option != job.option:
                job.option = changed[id] = option
        return changed

    def each(self) -> dict[str, tuple[JobMemory, Option]]:
        """The jobs that have started."""
        return {id: (job.memory, job.option) for id, job in self._jobs.items()}
