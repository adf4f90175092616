"""The engine's gauges, as a message to the API process."""

from __future__ import annotations

import msgspec

from coserve.core.gpu_memory import MemoryUse
from coserve.core.health import LoraServerInfo
from coserve.core.training.step_metrics import LoadSeconds
from coserve.core.types import AdapterRef, Message

STALL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # bounds, in seconds


class Starving(msgspec.Struct, frozen=True):
    """For `seconds`, fine-tuning slices ran only because of `train_patience` or `train_floor`. The last one was
    predicted to take at most `micro_step` seconds with `slack` seconds of slack (negative: past a deadline)."""

    seconds: float
    micro_step: float
    slack: float


class StallCounts(msgspec.Struct, frozen=True):
    """Stalls with one cause since the engine started. `buckets` has a count per bound of `STALL_BUCKETS` and one for
    longer stalls; `seconds` is the total. See `engine.stalls`."""

    cause: str
    seconds: float
    buckets: tuple[int, ...]


class TrainingBatches(msgspec.Struct, frozen=True):
    """Training forwards so far, and the total rows and jobs in them."""

    count: int = 0
    rows: int = 0
    jobs: int = 0


class StepCounts(msgspec.Struct, frozen=True):
    """Generation steps so far of one kind (`prefill` or `decode`), and their seconds. `overlapped`: the device ran
    training at the same time."""

    kind: str
    overlapped: bool
    count: int
    seconds: float


class AllocatorStats(msgspec.Struct, frozen=True):
    """Counts of torch's allocators since the process started; all 0 on a CPU."""

    peak: int = 0
    """Peak bytes of GPU memory in tensors."""
    allocs: int = 0
    """Calls of cudaMalloc."""
    frees: int = 0
    """Calls of cudaFree, which wait for the GPU."""
    retries: int = 0
    """Allocations for which cached memory had to be freed first."""
    pinned: int = 0
    """Calls of cudaHostAlloc."""


class EngineStats(Message, frozen=True):
    """Gauges, sent about once a second and after every change of state."""

    waiting: int
    running: int
    jobs: int
    pages_used: int
    pages_total: int
    pages_adapters: int
    """Pages that hold adapters, in use or not."""
    preemptions: int
    step_adapters: int
    """Number of adapters in each generation step, summed over the steps so far."""
    prefix_queries: int
    prefix_hits: int
    """Prompt tokens looked up in the prefix cache so far, and found there."""
    resident: tuple[AdapterRef, ...]
    serve_seconds: float
    train_seconds: float
    """Seconds spent so far in generation steps and in fine-tuning slices."""
    troubles: tuple[str, ...] = ()
    """Reads and writes that are being retried, and work that runs in smaller chunks since memory ran out; shown in
    /health."""
    steps: tuple[StepCounts, ...] = ()
    batches: TrainingBatches = TrainingBatches()
    patience_slices: int = 0
    """Fine-tuning slices so far that ran only because of `train_patience` or `train_floor`."""
    starving: Starving | None = None
    request_waits: float = 0.0
    """Seconds that the oldest queued request has waited; 0: the queue is empty."""
    training_waits: float = 0.0
    """Seconds since the last fine-tuning slice while a job could train; 0: no such job."""
    train_overlap_speed: float = 1.0
    """Training speed while a generation step overlaps it, as a fraction of full speed; 1 if they do not overlap. See
    `queues/slices.py`."""
    stalls: tuple[StallCounts, ...] = ()
    graphs_missing: int = 0
    """CUDA graphs still to be captured; 0 if none is captured at all."""
    allocator: AllocatorStats = AllocatorStats()
    host_adapter_bytes: int = 0
    """Host memory that adapters take."""
    loads: tuple[LoadSeconds, ...] = ()
    lora_servers: tuple[LoraServerInfo, ...] = ()
    backlog: int = 0
    """Bytes of earlier messages that the API process has not read."""
    memory: MemoryUse | None = None
    """None: memory is not planned."""
