"""Admission of jobs by memory, as the engine asks for it: start now, wait, or refuse. Pure: no torch, no IO, no
clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from coserve.admission.ledger import Ledger, Shortage
from coserve.admission.recompute_plan import JobMemory, Option, RecomputePlan, job_memory, shared_bytes
from coserve.core.errors import JobTooLarge
from coserve.core.gpu_memory import JobUse, MemoryModel, TrainingCosts
from coserve.core.training.jobs import JobSpec
from coserve.core.types import BaseSpec

MARGIN = 512 << 20
"""Bytes kept free for kernel workspaces and fragmentation."""
READINGS = 10
"""Memory that another process frees counts as available once it was free in every reading of this many seconds. Seconds
without a reading of the device do not count."""
Cause = Literal["jobs", "others"]


@dataclass(frozen=True)
class Start:
    """Decision to start a job, with this recompute plan (None: with the job's own settings). `note`: what differs from
    its settings, for the user."""

    recompute_plan: RecomputePlan | None = None
    note: str | None = None


@dataclass(frozen=True)
class Hold:
    """Decision to let a job wait, for other jobs to end or for other processes to free memory."""

    cause: Cause
    message: str


class HostAdmission:
    """Admits jobs by host memory alone: there is no plan of the GPU's memory."""

    troubles: tuple[str, ...] = ()
    shared_tokens: int | None = None

    def __init__(self, needs: Callable[[JobSpec], int] = lambda _: 0, limit: int | None = None) -> None:
        """`needs`: returns the bytes of host memory of a job's state. `limit`: bytes of all jobs; None: unlimited."""
        self._needs, self._limit = needs, limit
        self._started: dict[str, int] = {}
        """Bytes of each started job."""
        self._asked = ("", 0)
        """The job that was asked for last, and its bytes: a job that waits is asked for at each tick."""

    def admit(self, spec: JobSpec) -> Start | Hold:
        """See `MemoryAdmission.admit`."""
        if self._asked[0] != spec.id:
            self._asked = spec.id, self._needs(spec)
        size = self._asked[1]
        _check_host(size, self._limit)
        if (hold := _host_hold(size + sum(self._started.values()), self._limit)) is None:
            self._started[spec.id] = size
        return hold or Start()

    def release(self, job: str) -> None:
        self._started.pop(job, None)

    def changes(self) -> list[tuple[str, Start]]:
        return []

    def compiled(self, costs: TrainingCosts | None) -> None:
        pass


class MemoryAdmission:
    """Admits jobs into the GPU memory for jobs, which shrinks while other processes use it."""

    def __init__(self, model: MemoryModel, base: BaseSpec, micro_batch_tokens: int) -> None:
        self._model, self._base, self._micro_batch_tokens = model, base, micro_batch_tokens
        self._ledger = Ledger(model.training)
        self._specs: dict[str, JobSpec] = {}
        """Specs of the started jobs."""
        self._refused: tuple[str, int, Hold] | None = None
        """The last job that was held, the ledger's version at that time, and the answer: the engine asks before each
        tick."""
        self._fitted = 0
        self._shared: tuple[int, tuple[int, int]] | None = None
        """The ledger's version at the last computation of `_share`, and its result."""
        self._margin: int | None = None
        self._readings: deque[tuple[int, int]] = deque(maxlen=READINGS)
        """Each of the last seconds with a reading, and the least memory read in it. The device is also read when jobs
        come, many times a second."""

    @property
    def limit(self) -> int:
        """Bytes available to jobs now."""
        return self._ledger.limit

    @property
    def needed(self) -> int:
        """Bytes that the started jobs need."""
        return self._ledger.states + max(self._ledger.activations, self._share()[1])

    @property
    def pinned_limit(self) -> int | None:
        """Bytes of host memory for the state of jobs; None: unlimited."""
        return self._model.pinned

    @property
    def each(self) -> tuple[JobUse, ...]:
        """Memory use of each started job."""
        layers = self._base.layers
        return tuple(_use(id, memory, option, layers) for id, (memory, option) in self._ledger.each().items())

    @property
    def troubles(self) -> tuple[str, ...]:
        """A message if memory that was planned for jobs is not available."""
        limit, planned = self._ledger.limit, self._ledger.planned
        if limit >= planned:
            return ()
        lost = "other processes hold part of the GPU's memory that was planned for jobs"
        return (f"memory: {lost}: {limit} of {planned} bytes are left",)

    @property
    def shared_tokens(self) -> int | None:
        """Most tokens of a micro-batch that several jobs share: the engine's limit, halved until the micro-batch fits
        next to the state of all jobs. If it is less than two jobs' micro-batches have together, each job trains in its
        own."""
        return self._share()[0]

    def _share(self) -> tuple[int, int]:
        """Return `shared_tokens` and the bytes of such a micro-batch. The bytes count no more tokens than the jobs' own
        micro-batches have in all."""
        if self._shared is None or self._shared[0] != self._ledger.version:
            tokens, size = self._micro_batch_tokens, 0
            each, left = self._ledger.each().values(), self._ledger.limit - self._ledger.states
            jobs, asked = [memory for memory, _ in each], sum(option.recompute_plan.tokens for _, option in each)
            while len(jobs) > 1 and tokens:
                size = shared_bytes(self._model, self._base, jobs, min(tokens, asked))
                if size <= left:
                    break
                tokens, size = tokens // 2, 0
            self._shared = self._ledger.version, (tokens, size)
        return self._shared[1]

    def available(self, size: int, now: float) -> None:
        """Take a reading of the device: jobs have `size` bytes, those in use included. `now`: seconds, never
        decreasing."""
        if self._margin is None:  # the operator may have left less than `MARGIN`
            self._margin = min(MARGIN, max(0, size - self._ledger.planned))
        second, left = int(now), max(0, size - self._margin)
        if self._readings and self._readings[-1][0] == second:
            left = min(left, self._readings.pop()[1])
        self._readings.append((second, left))
        self._ledger.resize(min(least for _, least in self._readings))

    def compiled(self, costs: TrainingCosts | None) -> None:
        """Set the costs of compiled layers, with which jobs that run compiled layers are planned from now on; None:
        they run the base's own layers."""
        if costs is not self._model.compiled:
            self._model = msgspec.structs.replace(self._model, compiled=costs)
            self._ledger.replan({id: self._memory(spec) for id, spec in self._specs.items()})

    def _memory(self, spec: JobSpec) -> JobMemory:
        return job_memory(spec, self._base, self._model, self._micro_batch_tokens)

    def admit(self, spec: JobSpec) -> Start | Hold:
        """Decide on a job; called again and again while it waits. Raises `JobTooLarge`, `InvalidRequest` (settings that
        do not fit the base)."""
        if self._refused is not None and self._refused[:2] == (spec.id, self._ledger.version):
            return self._refused[2]
        memory = self._memory(spec)
        if (waits := self._host_hold(memory)) is not None:
            self._refused = spec.id, self._ledger.version, waits
            return waits
        found = self._ledger.admit(spec.id, memory)
        if isinstance(found, Option):
            self._specs[spec.id] = spec
            return self._start(memory, found)
        if found.never:
            raise too_large(memory, self._ledger.planned)
        hold = _hold(found, self._ledger.planned)
        self._refused = spec.id, self._ledger.version, hold
        return hold

    def _host_hold(self, memory: JobMemory) -> Hold | None:
        """Return why the job waits for host memory; None: it fits next to the started jobs. Raises
        `JobTooLarge`."""
        _check_host(memory.host, self._model.pinned)
        needed = memory.host + sum(one.host for one, _ in self._ledger.each().values())
        return _host_hold(needed, self._model.pinned)

    def release(self, job: str) -> None:
        """Remove a job that has ended or was paused."""
        self._specs.pop(job, None)
        self._ledger.release(job)

    def changes(self) -> list[tuple[str, Start]]:
        """Return the jobs whose recompute plan changes, because the available memory or the costs of layers have
        changed."""
        if self._fitted == self._ledger.version:
            return []
        before = self._ledger.each()
        changed = self._ledger.refit()
        self._fitted = self._ledger.version
        return [(id, self._start(before[id][0], option, before[id][1])) for id, option in changed.items()]

    def _start(self, memory: JobMemory, option: Option, before: Option | None = None) -> Start:
        """Return the decision with its note. `before`: the current plan of a job that has started; its note says what
        changes."""
        first = memory.options[0]
        if before is not None and before.recompute_plan.alike(option.recompute_plan):
            return Start(option.recompute_plan)
        if option == first:
            back = f"memory: there is enough now: it trains on {option.recompute_plan.tokens} tokens at once"
            return Start(option.recompute_plan, None if before is None else back)
        how = f"it trains on at most {option.recompute_plan.tokens} tokens at once"
        if option.recompute_plan.recomputed > first.recompute_plan.recomputed or option.recompute_plan.partly:
            how += f" and recomputes {_layers(option.recompute_plan, self._base.layers)} in the backward"
        needed, state = memory.state.total + first.activations, memory.state.total + option.activations
        return Start(
            option.recompute_plan,
            f"memory: {how}: that needs {state} bytes; {needed} bytes, for micro-batches of "
            f"{first.recompute_plan.tokens} tokens, do not fit into the {self._ledger.limit} bytes that are there for "
            "all jobs",
        )


def check_fits(spec: JobSpec, base: BaseSpec, model: MemoryModel, micro_batch_tokens: int) -> None:
    """Raise `JobTooLarge` for a job that does not fit as the only one, in the smallest micro-batches with full
    recomputation."""
    memory = job_memory(spec, base, model, micro_batch_tokens)
    if memory.least > model.training:
        raise too_large(memory, model.training)
    _check_host(memory.host, model.pinned)


def _check_host(needed: int, limit: int | None) -> None:
    """Raise `JobTooLarge` for a state that host memory never has room for. `limit`: bytes; None: unlimited."""
    if limit is not None and needed > limit:
        raise JobTooLarge(
            f"expected a state of at most {limit} bytes of host memory (pinned_memory_bytes), got {needed}: "
            f"{needed - limit} are missing; try an optimizer with 8 bits, a smaller rank or fewer targets",
            field="training.optimizer",
        )


def _host_hold(needed: int, limit: int | None) -> Hold | None:
    """Return why a job waits for host memory. `needed`: bytes, those of started jobs included."""
    if limit is None or needed <= limit:
        return None
    return Hold(
        "jobs",
        f"waiting for host memory: the state of this job and of those that train takes {needed} bytes of the "
        f"{limit} for it; it starts once one of them ends",
    )


def too_large(memory: JobMemory, planned: int) -> JobTooLarge:
    """Return the error for the user, with the numbers."""
    state, smallest = memory.state, memory.options[-1]
    tokens, layers = smallest.recompute_plan.tokens, smallest.recompute_plan.recomputed + smallest.recompute_plan.partly
    micro_batch = f"a micro-batch of {tokens} token{'' if tokens == 1 else 's'}"
    if layers:
        micro_batch += f" that recomputes {layers} layer{'' if layers == 1 else 's'}"
    return JobTooLarge(
        f"expected a job of at most {planned} bytes of GPU memory, got one of at least {memory.least}: "
        f"{state.adapter} for the adapter, {state.gradients} for its gradients, {state.optimizer} for the optimizer, "
        f"and {smallest.activations} for {micro_batch}; try a smaller rank, fewer targets or a smaller max_length",
        field="lora",
    )


def _layers(recompute_plan: RecomputePlan, layers: int) -> str:
    """Say which of the base's `layers` layers are recomputed, for the user."""
    whole, partly = recompute_plan.recomputed, recompute_plan.partly
    if not partly:
        return f"{whole} of {layers} layers"
    return (
        f"{whole} of {layers} layers, and {partly} more but for attention,"
        if whole
        else f"{partly} of {layers} layers but for attention"
    )


def _hold(found: Shortage, planned: int) -> Hold:
    if found.needed > planned:
        return Hold(
            "jobs",
            f"waiting for memory: with the jobs that train it needs at least {found.needed} bytes of the {planned} "
            "for jobs; it starts once one of them ends",
        )
    return Hold(
        "others",
        f"waiting for memory: other processes hold some of the GPU's; {found.needed} bytes are needed and "
        f"{found.limit} are left for jobs",
    )


def _use(id: str, memory: JobMemory, option: Option, layers: int) -> JobUse:
    state = memory.state
    return JobUse(
        id=id,
        adapter=state.adapter,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=option.activations,
        micro_batch_tokens=option.recompute_plan.tokens,
        recomputed_layers=option.recompute_plan.recomputed,
        partly_recomputed_layers=option.recompute_plan.partly,
        layers=layers,
        pinned=memory.pinned,
    )
