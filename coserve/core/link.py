"""Messages between the API process and the engine, and the channel for them.

A `Link` is one end of a duplex channel of messages. `local_pair` joins two ends in one process; for two processes see
`stream_link`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from coserve.core.errors import EngineUnavailable
from coserve.core.gpu_memory import MemoryModel, MemoryUse, PoolShape
from coserve.core.logprobs import PackedLogprobs
from coserve.core.step_metrics import StepMetrics
from coserve.core.types import AdapterDigests, AdapterRef, BaseSpec, FinishReason, JobSpec, SamplingParams, Slo

MAX_PROMPT_LOGPROBS = 256
"""Maximum prompt tokens with log-probabilities in one `Tokens`: the API process handles a message in one turn of its
loop."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message."""


# From the API process to the engine.


class Generate(Message, frozen=True):
    """Run one sequence. Answered by `Tokens`... with `finished` set on the last, or by one `RequestFailed`."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterRef | None
    slo: Slo
    cache_salt: str = ""
    """Only requests with the same salt share prefixes in the cache."""
    digests: AdapterDigests | None = None
    """Expected digests of the adapter's files, checked when they are read."""
    arrived: float | None = None
    """At the API, on this host's monotonic clock: its targets count from there, as a slice may be under way when it
    comes. None: from its receipt."""
    choices: tuple[str, ...] = ()
    """Of the last of a call's sequences (choices of its prompts): the ids of the others, which are refused with it. It
    is refused for coming late only while all of them wait."""


class CancelRequest(Message, frozen=True):
    id: str


class StartJob(Message, frozen=True):
    """Queue a job. It continues from its last checkpoint if it has one. `paused`: it waits for `ResumeJob`."""

    spec: JobSpec
    paused: bool = False


class PauseJob(Message, frozen=True):
    id: str


class ResumeJob(Message, frozen=True):
    id: str


class CancelJob(Message, frozen=True):
    id: str


class DropAdapter(Message, frozen=True):
    """Drop a version from memory: its files will be deleted. Requests that use it keep it until they end."""

    ref: AdapterRef


class SnapshotDone(Message, frozen=True):
    """No more samples of a `JobSnapshot` are wanted: its adapter is dropped, and the job may go on."""

    id: str
    ref: AdapterRef


class Shutdown(Message, frozen=True):
    """Finish the current tick, checkpoint running jobs, send `EngineStopped`, exit."""


# From the engine to the API process.


class EngineReady(Message, frozen=True):
    spec: BaseSpec
    kv_tokens: int
    pool: PoolShape
    lora_backend: str
    memory: MemoryModel | None = None
    """None where memory is not planned: jobs are not admitted by it."""
    notes: tuple[str, ...] = ()
    """For the operator: what runs slower than it could, and why; shown in /health."""


class EngineNotes(Message, frozen=True):
    """Replaces the notes of `EngineReady`."""

    notes: tuple[str, ...]


class EngineWarming(Message, frozen=True):
    """How far an engine is that starts. Sent any number of times before `EngineReady`, and never after it."""

    what: str
    """It does now, as in "compiling kernels"."""
    done: int
    total: int
    seconds_left: float | None
    """Estimated; None: unknown."""


class EngineRefused(Message, frozen=True):
    """The engine cannot start with these settings; `code` is that of a `StartupError`."""

    code: str
    message: str


class Admitted(Message, frozen=True):
    """A request was scheduled for the first time, which ends its queue time. Sent at most once. `at`: when its step
    began, on the monotonic clock that all processes of a host share."""

    id: str
    at: float


class Tokens(Message, frozen=True):
    """New tokens of one request, in order. `logprobs` has one entry a token if they were asked for.

    `prompt_logprobs`, if asked for, come before the first token, at most `MAX_PROMPT_LOGPROBS` in a message: one entry
    for each prompt token but the first.
    """

    id: str
    tokens: tuple[int, ...]
    logprobs: PackedLogprobs = PackedLogprobs()
    prompt_logprobs: PackedLogprobs = PackedLogprobs()
    finished: FinishReason | None = None


class RequestFailed(Message, frozen=True):
    """`retry_after`: seconds after which another attempt may succeed; None: unknown."""

    id: str
    code: str
    message: str
    retry_after: float | None = None


class JobStarted(Message, frozen=True):
    id: str
    total_steps: int
    resumed_from: int = 0
    """The step of the checkpoint that it resumed from."""
    note: str | None = None
    """Why that is not its last checkpoint; the job's record keeps it."""


class JobPaused(Message, frozen=True):
    id: str


class JobProgress(Message, frozen=True):
    id: str
    metrics: StepMetrics


class JobCheckpoint(Message, frozen=True):
    """A checkpoint is durable in the job's folder."""

    id: str
    step: int


class JobSnapshot(Message, frozen=True):
    """Requests may use the adapter of a job as it was after `step`, under a name that no user can give, until
    `SnapshotDone`."""

    id: str
    step: int
    ref: AdapterRef


class JobNote(Message, frozen=True):
    """A warning about a job that continues. `kept`: the job's record keeps it, besides the event."""

    id: str
    message: str
    kept: bool = False


class JobWaiting(Message, frozen=True):
    """What a job waits for: one in line for memory; one whose steps are all done for the disk, as its adapter's files
    cannot be written now and are tried again."""

    id: str
    message: str


class JobSucceeded(Message, frozen=True):
    """The adapter's files are durable, and requests may use the version."""

    id: str
    ref: AdapterRef


class JobFailed(Message, frozen=True):
    id: str
    code: str
    message: str


class JobCancelled(Message, frozen=True):
    id: str


class Starving(msgspec.Struct, frozen=True):
    """For `seconds`, training slices have run only because of `train_patience` or `train_floor`. The last one was
    expected to take at most `micro_step` seconds, and the slack was `slack` seconds (negative: a deadline had
    passed)."""

    seconds: float
    micro_step: float
    slack: float


STALL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # bounds, in seconds


class StallCounts(msgspec.Struct, frozen=True):
    """Stalls by one cause since the engine started: `buckets` has a count for each of `STALL_BUCKETS`, then one for all
    longer ones; `seconds` is their sum. See `engine.stalls`."""

    cause: str
    seconds: float
    buckets: tuple[int, ...]


class TrainingBatches(msgspec.Struct, frozen=True):
    """Training forwards so far, and the rows and the jobs of all of them together."""

    count: int = 0
    rows: int = 0
    jobs: int = 0


class StepCounts(msgspec.Struct, frozen=True):
    """Generation steps so far of a kind, `prefill` or `decode`, while the device computed training (`beside`) or not,
    and their seconds."""

    kind: str
    beside: bool
    count: int
    seconds: float


class EngineStats(Message, frozen=True):
    """Gauges, about once a second and after every change of state."""

    waiting: int
    running: int
    jobs: int
    pages_used: int
    pages_total: int
    pages_adapters: int
    """Pages that hold adapters, in use or not."""
    memory_planned: int
    """GPU memory in bytes that the plan gives to torch, and torch's peak; 0 without a plan."""
    memory_peak: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    """Prompt tokens looked up in the prefix cache so far, and found there."""
    resident: tuple[AdapterRef, ...]
    serve_seconds: float
    train_seconds: float
    """Time spent so far in generation steps and in fine-tuning slices."""
    troubles: tuple[str, ...] = ()
    """Reads and writes that are being retried, and work that runs in smaller parts since memory ran out; shown in
    /health."""
    steps: tuple[StepCounts, ...] = ()
    batches: TrainingBatches = TrainingBatches()
    patience_slices: int = 0
    """Fine-tuning slices so far that ran only because of `train_patience` or `train_floor`."""
    starving: Starving | None = None
    request_waits: float = 0.0
    """Seconds that the oldest request in the queue has waited; 0: none waits."""
    training_waits: float = 0.0
    """Seconds since the last fine-tuning slice of jobs that could train; 0: there are none."""
    train_speed_beside: float = 1.0
    """Share of its speed that training has while a generation step runs beside it (`queues/beside.py`); 1 where none
    does."""
    stalls: tuple[StallCounts, ...] = ()
    cuda_allocs: int = 0
    cuda_frees: int = 0
    cuda_alloc_retries: int = 0
    pinned_allocs: int = 0
    """See `memory.allocator`."""
    backlog: int = 0
    """Bytes of earlier messages that the API process has not read."""
    memory: MemoryUse | None = None
    """None where memory is not planned."""


class EngineStopped(Message, frozen=True):
    pass


ToEngine = (
    Generate | CancelRequest | StartJob | PauseJob | ResumeJob | CancelJob | DropAdapter | SnapshotDone | Shutdown
)
FromEngine = (
    EngineReady
    | EngineNotes
    | EngineWarming
    | EngineRefused
    | Admitted
    | Tokens
    | RequestFailed
    | JobStarted
    | JobPaused
    | JobProgress
    | JobCheckpoint
    | JobSnapshot
    | JobNote
    | JobWaiting
    | JobSucceeded
    | JobFailed
    | JobCancelled
    | EngineStats
    | EngineStopped
)


OutT = TypeVar("OutT")
InT = TypeVar("InT")
Out_contra = TypeVar("Out_contra", contravariant=True)
In_co = TypeVar("In_co", covariant=True)


class Link(Protocol[Out_contra, In_co]):
    """One end of a link. `send` never waits and keeps the order. `receive` raises `EngineUnavailable` when the peer is
    gone."""

    @property
    def backlog(self) -> int:
        """Bytes sent that are still buffered in this process."""
        ...

    def send(self, message: Out_contra) -> None: ...

    def send_all(self, messages: Sequence[Out_contra]) -> None:
        """As `send` of each, with one write."""
        ...

    async def receive(self) -> In_co: ...

    async def close(self) -> None: ...


class LocalLink(Generic[OutT, InT]):
    """One end of a pair within a process."""

    def __init__(self, outbox: asyncio.Queue[OutT | None], inbox: asyncio.Queue[InT | None]) -> None:
        self._outbox, self._inbox = outbox, inbox

    @property
    def backlog(self) -> int:
        return 0

    def send(self, message: OutT) -> None:
        self._outbox.put_nowait(message)

    def send_all(self, messages: Sequence[OutT]) -> None:
        for message in messages:
            self.send(message)

    async def receive(self) -> InT:
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)
            raise EngineUnavailable("the other end of the link closed")
        return message

    async def close(self) -> None:
        self._outbox.put_nowait(None)


def local_pair() -> tuple[LocalLink[ToEngine, FromEngine], LocalLink[FromEngine, ToEngine]]:
    """The API's end and the engine's end."""
    to_engine: asyncio.Queue[ToEngine | None] = asyncio.Queue()
    from_engine: asyncio.Queue[FromEngine | None] = asyncio.Queue()
    return LocalLink(to_engine, from_engine), LocalLink(from_engine, to_engine)
