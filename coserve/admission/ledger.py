"""The ledger of GPU memory for fine-tuning jobs: which jobs fit, and with which recompute plan each trains. Pure: no
torch, no IO, no clock.

Every job keeps its state (weights, gradients, optimizer) between micro-batches. Micro-batches run one at a time, so the
ledger counts the activations of one job only: the one with the most. `MemoryAdmission.shared_tokens` bounds a
micro-batch that several jobs share. A job starts if the states of all jobs fit and, next to them, its micro-batches
with some recompute plan; plans of other jobs stay as they are. When memory is free again, each job gets the fastest
plan that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coserve.admission.recompute_plan import JobMemory, Option


@dataclass(frozen=True)
class Shortage:
    """Why a job cannot start now, in bytes."""

    needed: int
    """Least that all started jobs and this one need."""
    limit: int
    """Available to all jobs now."""
    never: bool
    """Whether the job would not fit even if it were the only one and other processes freed all memory."""


@dataclass
class _Admitted:
    memory: JobMemory
    option: Option


@dataclass
class Ledger:
    """Memory of the started jobs. `planned`: bytes for jobs, as planned at the start; `limit`: bytes available now."""

    planned: int
    limit: int = 0
    version: int = 0
    """Incremented by every change that `admit` depends on."""
    _jobs: dict[str, _Admitted] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.limit = self.limit or self.planned

    @property
    def states(self) -> int:
        """Bytes that the jobs keep between micro-batches."""
        return sum(job.memory.state.total for job in self._jobs.values())

    @property
    def activations(self) -> int:
        """Largest activations of one job, in bytes."""
        return max((job.option.activations for job in self._jobs.values()), default=0)

    def admit(self, job: str, memory: JobMemory) -> Option | Shortage:
        """Start a job with the fastest recompute plan that fits, or return what is missing."""
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
        """Remove a job that has ended or was paused; a job that was not admitted is ignored."""
        if self._jobs.pop(job, None) is not None:
            self.version += 1

    def resize(self, limit: int) -> None:
        """Set the bytes that are available to jobs now, at most `planned`."""
        limit = min(limit, self.planned)
        if limit != self.limit:
            self.limit, self.version = limit, self.version + 1

    def replan(self, memories: Mapping[str, JobMemory]) -> None:
        """Replace what jobs need. They keep their plans until `refit`."""
        for id, memory in memories.items():
            self._jobs[id].memory = memory
        self.version += 1

    def refit(self) -> dict[str, Option]:
        """Give each job the fastest recompute plan that fits, else its smallest; return the jobs whose plan changed."""
        left, changed = self.limit - self.states, dict[str, Option]()
        for id, job in self._jobs.items():
            option = job.memory.best(left) or job.memory.options[-1]
            if option != job.option:
                job.option = changed[id] = option
        return changed

    def each(self) -> dict[str, tuple[JobMemory, Option]]:
        """The started jobs: what each needs, and its current plan."""
        return {id: (job.memory, job.option) for id, job in self._jobs.items()}
