"""Messages between the API process and the engine, and the channel for them.

A `Link` is one end of a duplex channel of messages. `local_pair` joins two ends in one process; for two processes see
`channel`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from coserve.core.gpu_memory import MemoryModel, MemoryUse, PoolShape
from coserve.core.grammar import Grammar
from coserve.core.logprobs import PackedLogprobs
from coserve.core.step_metrics import LoadSeconds, StepMetrics
from coserve.core.training.messages import CallDone, CallFailed, CallSession, OpenSession
from coserve.core.types import AdapterDigests, AdapterRef, BaseSpec, FinishReason, JobSpec, SamplingParams, Slo

ALIVE = 10.0
"""Maximum seconds between two messages of an engine that has work, unless a single step or slice takes longer."""
MAX_PROMPT_LOGPROBS = 256
"""Maximum prompt tokens with log-probabilities per `Tokens` message. The API process handles a message without yielding
to its event loop."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message."""


# From the API process to the engine.


class Generate(Message, frozen=True):
    """Generate one sequence: answered by `Tokens`, the last with `finished` set, or by one `RequestFailed`."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterRef | None
    slo: Slo
    cache_salt: str = ""
    """Only requests with the same salt share prefixes in the KV cache."""
    digests: AdapterDigests | None = None
    """Expected digests of the adapter's files, checked when they are read."""
    arrived: float | None = None
    """Arrival at the API, host-wide monotonic seconds, from which deadlines count; None: from the receipt."""
    grammar: Grammar | None = None
    """Grammar that the text follows."""
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Tokens that may be sampled (None: all), and token sequences that the output must not have."""
    choices: tuple[str, ...] = ()
    """Ids of the call's other sequences; set on its last one only. If it is shed, all are, and only while all wait."""


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
    """Drop an adapter version from memory, for its files will be deleted. Requests that use it keep it to their end."""

    ref: AdapterRef


class PrefetchAdapter(Message, frozen=True):
    """Read an adapter version into host memory. `pinned`: keep it there (True); no longer (False; nothing is read)."""

    ref: AdapterRef
    digests: AdapterDigests
    pinned: bool | None = None


class SetLogLevel(Message, frozen=True):
    """Log from this level on: debug, info, warning or error."""

    level: str


class SnapshotDone(Message, frozen=True):
    """End sampling from a `JobSnapshot`: its adapter is dropped, and the job may go on."""

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
    """None: memory is not planned, so jobs are admitted without a memory check."""
    host_adapter_limit: int = 0
    notes: tuple[str, ...] = ()
    """Notes for the operator, shown in /health: what runs slower than it could, and why."""


class EngineNotes(Message, frozen=True):
    """Replaces the notes of `EngineReady`."""

    notes: tuple[str, ...]


class EngineWarming(Message, frozen=True):
    """Progress of an engine's start. Sent any number of times before `EngineReady`, never after it."""

    what: str
    """The current activity, such as "compiling kernels"."""
    done: int
    total: int
    seconds_left: float | None
    """Estimate; None: unknown."""


class EngineRefused(Message, frozen=True):
    """The engine cannot start with these settings. `code` is that of a `StartupError`."""

    code: str
    message: str


class Admitted(Message, frozen=True):
    """A request was scheduled for the first time, which ends its queue time. Sent at most once. `at`: when its step
    began, host-wide monotonic seconds."""

    id: str
    at: float


class Tokens(Message, frozen=True):
    """New tokens of one request, in order. `logprobs`, if requested, has one entry per token.

    `prompt_logprobs`, if requested, come before the first token, at most `MAX_PROMPT_LOGPROBS` per message: one entry
    for each prompt token but the first.
    """

    id: str
    tokens: tuple[int, ...]
    logprobs: PackedLogprobs = PackedLogprobs()
    prompt_logprobs: PackedLogprobs = PackedLogprobs()
    finished: FinishReason | None = None
    ends_in_text: bool = False
    """Whether it stopped although its last token is part of the text: its grammar was complete."""


class RequestFailed(Message, frozen=True):
    """A request ended with an error. `retry_after`: seconds after which another attempt may succeed; None: unknown."""

    id: str
    code: str
    message: str
    retry_after: float | None = None


class JobStarted(Message, frozen=True):
    id: str
    total_steps: int
    resumed_from: int = 0
    """Step of the checkpoint that the job resumed from."""
    note: str | None = None
    """Why it resumed from an older checkpoint than its last one; stored in the job's record."""


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
    """The adapter of a job after `step` can be used by requests, under a name that no user can give, until
    `SnapshotDone`."""

    id: str
    step: int
    ref: AdapterRef
    final: bool = False
    """The job is trained: these weights are to be published."""


class JobNote(Message, frozen=True):
    """A warning about a job that continues, sent as an event. `kept`: it is also stored in the job's record."""

    id: str
    message: str
    kept: bool = False


class JobWaiting(Message, frozen=True):
    """Why a job waits: for memory, while queued; or, with all steps done, for the disk, since its adapter's files
    cannot be written now and are retried."""

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
    """For `seconds`, fine-tuning slices ran only because of `train_patience` or `train_floor`. The last one was
    predicted to take at most `micro_step` seconds with `slack` seconds of slack (negative: past a deadline)."""

    seconds: float
    micro_step: float
    slack: float


STALL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # bounds, in seconds


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
    """Generation steps so far of one kind (`prefill` or `decode`), and their seconds. `beside`: the device ran training
    at the same time."""

    kind: str
    beside: bool
    count: int
    seconds: float


class EngineStats(Message, frozen=True):
    """Gauges, sent about once a second and after every change of state."""

    waiting: int
    running: int
    jobs: int
    pages_used: int
    pages_total: int
    pages_adapters: int
    """Pages that hold adapters, in use or not."""
    memory_planned: int
    """Bytes of GPU memory that the plan gives to torch, and torch's peak; 0 without a plan."""
    memory_peak: int
    preemptions: int
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
    train_speed_beside: float = 1.0
    """Training speed while a generation step overlaps it, as a fraction of full speed (`queues/beside.py`); 1 if they
    do not overlap."""
    stalls: tuple[StallCounts, ...] = ()
    cuda_allocs: int = 0
    cuda_frees: int = 0
    cuda_alloc_retries: int = 0
    pinned_allocs: int = 0
    """See `memory.allocator`."""
    host_adapter_bytes: int = 0
    """Host memory that adapters take."""
    loads: tuple[LoadSeconds, ...] = ()
    backlog: int = 0
    """Bytes of earlier messages that the API process has not read."""
    memory: MemoryUse | None = None
    """None: memory is not planned."""


class EngineStopped(Message, frozen=True):
    pass


ToEngine = (
    Generate
    | CancelRequest
    | StartJob
    | PauseJob
    | ResumeJob
    | CancelJob
    | OpenSession
    | CallSession
    | DropAdapter
    | PrefetchAdapter
    | SetLogLevel
    | SnapshotDone
    | Shutdown
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
    | CallDone
    | CallFailed
    | EngineStats
    | EngineStopped
)


OutT = TypeVar("OutT")
InT = TypeVar("InT")
Out_contra = TypeVar("Out_contra", contravariant=True)
In_co = TypeVar("In_co", covariant=True)


class PeerLost(ConnectionError):
    """The other end of a link or channel is closed, or its process has ended."""


class Link(Protocol[Out_contra, In_co]):
    """One end of a link. `send` never blocks and keeps the order. `receive` raises `PeerLost` when the peer is gone."""

    @property
    def backlog(self) -> int:
        """Return the bytes sent that are still buffered in this process."""
        ...

    def send(self, message: Out_contra) -> None: ...

    def send_all(self, messages: Sequence[Out_contra]) -> None:
        """Send all messages in order, with one write."""
        ...

    async def receive(self) -> In_co: ...

    async def close(self) -> None: ...


class LocalLink(Generic[OutT, InT]):
    """One end of a link within a process."""

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
            raise PeerLost("the other end of the link closed")
        return message

    async def close(self) -> None:
        self._outbox.put_nowait(None)


def local_pair() -> tuple[LocalLink[ToEngine, FromEngine], LocalLink[FromEngine, ToEngine]]:
    """Return the API's end and the engine's end of a link within a process."""
    to_engine: asyncio.Queue[ToEngine | None] = asyncio.Queue()
    from_engine: asyncio.Queue[FromEngine | None] = asyncio.Queue()
    return LocalLink(to_engine, from_engine), LocalLink(from_engine, to_engine)
