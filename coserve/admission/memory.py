"""Admission of jobs by memory, as the engine asks for it: start now, wait, or never. Pure: no torch, no IO, no
clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import msgspec

from coserve.admission.ledger import Ledger, Shortage
from coserve.admission.treatment import JobMemory, Option, Treatment, job_memory, shared_bytes
from coserve.core.errors import JobTooLarge
from coserve.core.gpu_memory import JobUse, MemoryModel, TrainingCosts
from coserve.core.types import BaseSpec, JobSpec

GIB = 1 << 30
MARGIN = 512 << 20
"""Bytes that stay free: workspaces of kernels, and what fragmentation wastes."""
READINGS = 10
"""Seconds with readings of the device's memory: what another process gave back counts once it was there in so many of
them."""
Cause = Literal["jobs", "others"]


@dataclass(frozen=True)
class Start:
    """The job starts, with these micro-batches; None: as planned. `note`: what is different, for the user."""

    treatment: Treatment | None = None
    note: str | None = None


@dataclass(frozen=True)
class Hold:
    """The job waits: for other jobs to end, or for other processes to give memory back."""

    cause: Cause
    message: str


class AdmitsAll:
    """Where no memory is planned: on a CPU."""

    troubles: tuple[str, ...] = ()
    shared_tokens: int | None = None

    def admit(self, spec: JobSpec) -> Start | Hold:
        """Every job starts as planned."""
        return Start()

    def release(self, job: str) -> None:
        pass

    def changes(self) -> list[tuple[str, Start]]:
        return []

    def compiled(self, costs: TrainingCosts | None) -> None:
        pass


class MemoryAdmission:
    """Admits jobs within the memory for jobs, which shrinks where other processes take memory."""

    def __init__(self, model: MemoryModel, base: BaseSpec, micro_batch_tokens: int) -> None:
        """`micro_batch_tokens`: the engine's limit."""
        self._model, self._base, self._micro_batch_tokens = model, base, micro_batch_tokens
        self._ledger = Ledger(model.training)
        self._specs: dict[str, JobSpec] = {}
        """Of the jobs that have started."""
        self._refused: tuple[str, int, Hold] | None = None
        """The last job that was held, and the ledger's version then: asked before each tick, it is computed once."""
        self._fitted = 0
        self._shared: tuple[int, tuple[int, int]] | None = None
        """The ledger's version, and `_share` then."""
        self._margin: int | None = None
        self._readings: deque[tuple[int, int]] = deque(maxlen=READINGS)
        """The last seconds with readings, and the least of each: the device is also read when jobs come, many times a
        second."""

    @property
    def limit(self) -> int:
        """Bytes for jobs now."""
        return self._ledger.limit

    @property
    def needed(self) -> int:
        """Bytes of those that the jobs need."""
        return self._ledger.states + max(self._ledger.activations, self._share()[1])

    @property
    def pinned_limit(self) -> int | None:
        """Bytes of pinned host memory for jobs; None: any number."""
        return self._model.pinned

    @property
    def each(self) -> tuple[JobUse, ...]:
        """The jobs that have started."""
        layers = self._base.layers
        return tuple(_use(id, memory, option, layers) for id, (memory, option) in self._ledger.each().items())

    @property
    def troubles(self) -> tuple[str, ...]:
        """Memory that was planned for jobs and is not there."""
        limit, planned = self._ledger.limit, self._ledger.planned
        if limit >= planned:
            return ()
        return (
            (
                f"memory: other processes hold part of the GPU's memory that was planned for jobs: {limit} of "
                f"{planned} bytes are left"
            ),
        )

    @property
    def shared_tokens(self) -> int | None:
        """Most tokens of a forward that several of the jobs share: the engine's limit, or its half, and so on, whatever
        first fits beside what all of them keep. Below what two of them ask for, each trains alone."""
        return self._share()[0]

    def _share(self) -> tuple[int, int]:
        """`shared_tokens`, and the bytes that so many take, or all that the jobs ask for if that is less."""
        if self._shared is None or self._shared[0] != self._ledger.version:
            tokens, size = self._micro_batch_tokens, 0
            each, left = self._ledger.each().values(), self._ledger.limit - self._ledger.states
            jobs, asked = [memory for memory, _ in each], sum(option.treatment.tokens for _, option in each)
            while len(jobs) > 1 and tokens:
                size = shared_bytes(self._model, self._base, jobs, min(tokens, asked))
                if size <= left:
                    break
                tokens, size = tokens // 2, 0
            self._shared = self._ledger.version, (tokens, size)
        return self._shared[1]

    def available(self, size: int, now: float) -> None:
        """A reading of the device: `size` bytes are there for jobs, those that they have included. `now`: seconds,
        never less than before."""
        if self._margin is None:  # what the operator leaves, if that is less
            self._margin = min(MARGIN, max(0, size - self._ledger.planned))
        second, left = int(now), max(0, size - self._margin)
        if self._readings and self._readings[-1][0] == second:
            left = min(left, self._readings.pop()[1])
        self._readings.append((second, left))
        self._ledger.resize(min(least for _, least in self._readings))

    def compiled(self, costs: TrainingCosts | None) -> None:
        """Costs of compiled layers, by which jobs that run them are planned from now on; None: they run the base's
        own."""
        if costs is not self._model.compiled:
            self._model = msgspec.structs.replace(self._model, compiled=costs)
            self._ledger.replan({id: self._memory(spec) for id, spec in self._specs.items()})

    def _memory(self, spec: JobSpec) -> JobMemory:
        return job_memory(spec, self._base, self._model, self._micro_batch_tokens)

    def admit(self, spec: JobSpec) -> Start | Hold:
        """Asked again and again while the job waits. Raises `JobTooLarge`, `InvalidRequest` (settings that do not fit
        the base)."""
        if self._refused is not None and self._refused[:2] == (spec.id, self._ledger.version):
            return self._refused[2]
        memory = self._memory(spec)
        if (waits := self._pinned_hold(memory)) is not None:
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

    def _pinned_hold(self, memory: JobMemory) -> Hold | None:
        """None: its host memory fits beside that of the jobs that have started. Raises `JobTooLarge`."""
        _check_pinned(memory, self._model)
        limit, needed = self._model.pinned, sum(one.pinned for one, _ in self._ledger.each().values())
        needed += memory.pinned
        if limit is None or needed <= limit:
            return None
        return Hold(
            "jobs",
            f"waiting for host memory: the state of this job and of those that train takes {needed} bytes of the "
            f"{limit} for it; it "
            "starts once one of them ends",
        )

    def release(self, job: str) -> None:
        """The job has ended, or was paused."""
        self._specs.pop(job, None)
        self._ledger.release(job)

    def changes(self) -> list[tuple[str, Start]]:
        """Jobs that train otherwise from now on, as there is less memory or more, or their layers take less or more."""
        if self._fitted == self._ledger.version:
            return []
        before = self._ledger.each()
        changed = self._ledger.refit()
        self._fitted = self._ledger.version
        return [(id, self._start(before[id][0], option, before[id][1])) for id, option in changed.items()]

    def _start(self, memory: JobMemory, option: Option, before: Option | None = None) -> Start:
        """`before`: of a job that has started. It is told what changes."""
        first = memory.options[0]
        if before is not None and before.treatment.alike(option.treatment):
            return Start(option.treatment)
        if option == first:
            back = f"memory: there is enough now: it trains on {option.treatment.tokens} tokens at once"
            return Start(option.treatment, None if before is None else back)
        how = f"it trains on at most {option.treatment.tokens} tokens at once"
        if option.treatment.recomputed > first.treatment.recomputed or option.treatment.partly:
            how += f" and recomputes {_layers(option.treatment, self._base.layers)} in the backward"
        needed, state = memory.state.total + first.activations, memory.state.total + option.activations
        return Start(
            option.treatment,
            f"memory: {how}: that needs {state} bytes; {needed} bytes, for micro-batches of {first.treatment.tokens} "
            "tokens, "
            f"do not fit into the {self._ledger.limit} bytes that are there for all jobs",
        )


def check_fits(spec: JobSpec, base: BaseSpec, model: MemoryModel, micro_batch_tokens: int) -> None:
    """Raises `JobTooLarge` for a job that does not fit alone, in the smallest micro-batches and with recomputation."""
    memory = job_memory(spec, base, model, micro_batch_tokens)
    if memory.least > model.training:
        raise too_large(memory, model.training)
    _check_pinned(memory, model)


def _check_pinned(memory: JobMemory, model: MemoryModel) -> None:
    if model.pinned is not None and memory.pinned > model.pinned:
        raise JobTooLarge(
            f"expected a state of at most {model.pinned} bytes of host memory (pinned_memory_bytes), got "
            f"{memory.pinned}; try "
            "an optimizer with 8 bits, a smaller rank or fewer targets",
            field="training.optimizer",
        )


def too_large(memory: JobMemory, planned: int) -> JobTooLarge:
    """The error for the user, with the numbers."""
    state, smallest = memory.state, memory.options[-1]
    tokens, layers = smallest.treatment.tokens, smallest.treatment.recomputed + smallest.treatment.partly
    micro_batch = f"a micro-batch of {tokens} token{'' if tokens == 1 else 's'}"
    if layers:
        micro_batch += f" that recomputes {layers} layer{'' if layers == 1 else 's'}"
    return JobTooLarge(
        f"expected a job of at most {planned} bytes of GPU memory, got one of at least {memory.least}: {state.adapter} "
        "for the "
        f"adapter, {state.gradients} for its gradients, {state.optimizer} for the optimizer, and "
        f"{smallest.activations} for "
        f"{micro_batch}; try a smaller rank, fewer targets or a smaller max_length",
        field="lora",
    )


def _layers(treatment: Treatment, layers: int) -> str:
    """Those that are computed again, of `layers`, for the user."""
    whole, partly = treatment.recomputed, treatment.partly
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
            f"waiting for memory: with the jobs that train it needs at least {found.needed} bytes of the {planned} for "
            "jobs; it "
            "starts once one of them ends",
        )
    return Hold(
        "others",
        f"waiting for memory: other processes hold some of the GPU's; {found.needed} bytes are needed and "
        f"{found.limit} are left for "
        "jobs",
    )


def _use(id: str, memory: JobMemory, option: Option, layers: int) -> JobUse:
    state = memory.state
    return JobUse(
        id=id,
        adapter=state.adapter,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=option.activations,
        micro_batch_tokens=option.treatment.tokens,
        recomputed_layers=option.treatment.recomputed,
        partly_recomputed_layers=option.treatment.partly,
        layers=layers,
        pinned=memory.pinned,
    )
