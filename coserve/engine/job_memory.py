"""The GPU's current memory (how much admission may use, and a breakdown for /health), and the admission of queued jobs
by it: whether one may start, and the messages about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from coserve.admission.memory import Cause, HostAdmission, MemoryAdmission, Start
from coserve.core.gpu_memory import MemoryUse
from coserve.core.link.jobs import JobNote, JobWaiting
from coserve.core.link.link import FromEngine
from coserve.core.training.jobs import JobSpec
from coserve.engine.active_job import ActiveJob
from coserve.engine.ports import Trains
from coserve.memory.allocator import Reading
from coserve.memory.graph_bytes import GraphBytes


@dataclass(frozen=True)
class Fixed:
    """Sizes in bytes that stay constant while the engine runs."""

    held: int
    """Allocated before the first request: the base, the page pool and other buffers."""
    pages: int
    """The page pool."""
    page: int
    """One page."""
    step: int
    """Upper bound of a generation step's temporaries."""
    graphs: int
    """Estimate for CUDA graphs, used until they are captured."""
    context: int
    """Upper bound for the CUDA context and libraries of a typical process."""
    planned: int
    """Upper bound of torch's memory according to the plan; 0 without a plan."""


class DeviceMemory:
    """Readings of the device, which tell `admission` how much memory jobs may use."""

    def __init__(
        self,
        admission: MemoryAdmission,
        fixed: Fixed,
        read: Callable[[], Reading],
        graphs: GraphBytes,
        graphs_done: Callable[[int], None] = lambda size: None,
        clock: Callable[[], float] = time.monotonic,
        taken_elsewhere: Callable[[], int] = lambda: 0,
    ) -> None:
        """`graphs_done` is called with the size of all graphs whenever none is missing and it has grown. `clock`
        returns seconds. `taken_elsewhere` returns the largest growth since the start, over the other ranks, of the
        bytes in use on a rank's GPU outside its allocator."""
        self.admission, self._fixed, self._read, self._graphs = admission, fixed, read, graphs
        self._graphs_done, self._reported_graphs, self._clock = graphs_done, 0, clock
        self._taken_elsewhere = taken_elsewhere
        self._own = read().outside
        """Lowest reading of the bytes outside torch's allocator: our CUDA context and libraries, and other processes at
        the start."""
        self.refresh()

    def refresh(self) -> Reading:
        """Read the device and update admission. Memory of other processes is not available to jobs; memory that torch's
        allocator caches is."""
        reading = self._read()
        self._own = min(self._own, reading.outside)
        fixed, graphs = self._fixed, self._graphs
        size = graphs.size if graphs.complete else max(graphs.size, fixed.graphs)
        more = max(0, self._taken_elsewhere() - (reading.outside - self._own))
        available = reading.free + reading.reserved - more - fixed.held - size - fixed.step
        self.admission.available(available, self._clock())
        if graphs.complete and graphs.size > self._reported_graphs:  # later graphs: other LoRA ranks
            self._reported_graphs = graphs.size
            self._graphs_done(graphs.size)
        return reading

    def use(self, adapter_pages: int) -> MemoryUse:
        """The memory breakdown for /health. Reads the device."""
        now, fixed, admission = self.refresh(), self._fixed, self.admission
        each = admission.each
        beyond = max(0, now.allocated - fixed.held)
        jobs = min(beyond, sum(job.state for job in each))
        graphs = min(self._graphs.size, max(0, now.reserved - fixed.held - jobs))
        temporary = beyond - jobs
        context = min(now.outside, max(self._own, fixed.context))
        return MemoryUse(
            total=now.total,
            weights=fixed.held - fixed.pages,
            pages=fixed.pages,
            adapters=adapter_pages * fixed.page,
            graphs=graphs,
            jobs=jobs,
            temporary=temporary,
            cached=max(0, now.reserved - fixed.held - jobs - graphs - temporary),
            context=context,
            others=now.outside - context,
            free=now.free,
            planned=fixed.planned,
            training=admission.limit,
            needed=admission.needed,
            peak=now.peak,
            pinned=sum(job.pinned for job in each),
            pinned_limit=admission.pinned_limit,
            each=each,
        )


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
