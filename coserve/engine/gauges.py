"""What the engine reports of itself."""

from __future__ import annotations

from coserve.engine.device_memory import DeviceMemory
from coserve.engine.job_runner import JobRunner
from coserve.engine.ports import Generates, StoresAdapters
from coserve.engine.stalls import Stalls
from coserve.engine.views import Views
from coserve.link import EngineStats


def engine_stats(
    generator: Generates,
    adapters: StoresAdapters,
    jobs: JobRunner,
    views: Views,
    stalls: Stalls,
    now: float,
    requests: tuple[int, int],
    seconds: tuple[float, float],
    memory: DeviceMemory | None,
    backlog: int,
) -> EngineStats:
    """`requests` that wait and that run; `seconds` in generation steps and in slices."""
    allocator = generator.allocator()
    return EngineStats(
        waiting=requests[0],
        running=requests[1],
        jobs=len(jobs),
        pages_used=generator.pages_used,
        pages_total=generator.pages_total,
        pages_adapters=generator.adapter_pages,
        memory_planned=0 if memory is None else memory.planned,
        memory_peak=allocator.peak,
        cuda_allocs=allocator.allocs,
        cuda_frees=allocator.frees,
        cuda_alloc_retries=allocator.retries,
        pinned_allocs=allocator.pinned,
        preemptions=generator.preemptions,
        prefix_queries=generator.prefix_queries,
        prefix_hits=generator.prefix_hits,
        resident=adapters.resident(),
        serve_seconds=seconds[0],
        train_seconds=seconds[1],
        troubles=adapters.troubles + jobs.troubles + generator.troubles,
        batches=jobs.batches,
        patience_slices=views.slices.by_patience,
        starving=views.slices.starving(now),
        stalls=stalls.totals(),
        backlog=backlog,
        memory=None if memory is None else memory.use(generator.adapter_pages),
    )
