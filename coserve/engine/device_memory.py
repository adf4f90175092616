"""The GPU's current memory: how much admission may use, and a breakdown for /health."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from coserve.admission.memory import MemoryAdmission
from coserve.core.gpu_memory import MemoryUse
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
        self.planned = fixed.planned
        """Upper bound of torch's memory according to the plan; 0 without a plan."""
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
