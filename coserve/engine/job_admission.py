"""Memory admission of queued jobs: whether one may start, and the messages about it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from coserve.admission.memory import Cause, HostAdmission, Start
from coserve.core.link.jobs import JobNote, JobWaiting
from coserve.core.link.link import FromEngine
from coserve.core.training.jobs import JobSpec
from coserve.engine.active_job import ActiveJob
from coserve.engine.device_memory import DeviceMemory
from coserve.engine.ports import Trains


class JobAdmission:
    """Admits jobs by the GPU's memory or by host memory alone, and tracks memory being freed."""

    def __init__(
        self, memory: DeviceMemory | HostAdmission, trainer: Trains, send: Callable[[FromEngine], None]
    ) -> None:
        self._device = memory if isinstance(memory, DeviceMemory) else None
        self._memory = memory.admission if isinstance(memory, DeviceMemory) else memory
        self._trainer, self._send = trainer, send
        self._asked: str | None = None
        """The last job for which `admit` was called."""
        self._held: dict[str, Cause] = {}
        """Queued jobs for which a `JobWaiting` was sent, and why they wait for memory."""
        self._leaving: dict[str, Future[Any] | None] = {}
        """Jobs whose memory is not yet free, and their cancelled work on a thread."""

    @property
    def held(self) -> bool:
        """Whether a queued job waits for memory."""
        return bool(self._held)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Notes for /health."""
        held = (f"jobs: {len(self._held)} in line wait for memory",) if self._held else ()
        return (*held, *self._memory.troubles)

    def admit(self, spec: JobSpec) -> Start | None:
        """Admit a job. None: it waits for memory, and a `JobWaiting` was sent, unless that memory is its own from an
        earlier start. Raises `JobTooLarge`, `InvalidRequest`."""
        self._memory.compiled(self._trainer.layer_costs)
        self._release_freed()
        if spec.id in self._leaving:
            return None
        if self._device is not None and self._asked != spec.id:
            self._asked = spec.id
            self._device.refresh()
        found = self._memory.admit(spec)
        if isinstance(found, Start):
            self._held.pop(spec.id, None)
            return found
        if self._held.get(spec.id) != found.cause:
            self._held[spec.id] = found.cause
            self._send(JobWaiting(id=spec.id, message=found.message))
        return None

    def left_queue(self, job: str) -> None:
        """Forget a queued job that ended or was paused."""
        self._held.pop(job, None)

    def release(self, job: str, cancelled: Future[Any] | None = None) -> None:
        """Give back the memory of a job that had started and now ended or was paused. It becomes available once the
        job's `cancelled` work on a thread has ended, and the micro-batch that it shared with other jobs."""
        self._leaving[job] = cancelled

    def _release_freed(self) -> None:
        for job, cancelled in tuple(self._leaving.items()):
            if (cancelled is None or cancelled.done()) and not self._trainer.holds_memory_of(job):
                del self._leaving[job]
                self._memory.release(job)

    def changes(self) -> list[tuple[str, Start]]:
        """Return jobs whose recompute plan changes. Also tells the trainer how many tokens jobs may share."""
        self._memory.compiled(self._trainer.layer_costs)
        self._release_freed()
        self._trainer.limit_shared(self._memory.shared_tokens)
        return [(job, found) for job, found in self._memory.changes() if job not in self._leaving]

    def limit(self, active: ActiveJob, found: Start) -> None:
        """Apply a recompute plan to the job from now on."""
        active.recompute_plan = found.recompute_plan
        if found.note is not None:
            self._send(JobNote(id=active.spec.id, message=found.note, kept=True))
        if active.loaded and found.recompute_plan is not None:
            self._trainer.limit(active.spec.id, found.recompute_plan)
