"""A follower rank: it executes the commands of rank 0, in order, and decides nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import assert_never

import torch

from coserve.core.cancellation import Cancellation
from coserve.core.errors import CoserveError, EngineFault, InternalError, RequestOutOfMemory
from coserve.core.link.channel import Channel
from coserve.core.training.jobs import JobSpec
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.engine.ranks import commands
from coserve.engine.ranks.commands import PageTables
from coserve.engine.ranks.progress import Progress
from coserve.finetune.sessions.followed import FollowedSessions, LoadedSession
from coserve.generate.execution.interface import StepExecutor, StepInFlight, StepInput
from coserve.generate.sampling.masks import Masks
from coserve.lora.store.packing import copied_into
from coserve.lora.store.store import READERS
from coserve.memory.kv import KvCache
from coserve.memory.pages import Span
from coserve.model.agreement import FailedTogether
from coserve.model.faults import out_of_memory
from coserve.model.lora import LoraWeights

Commands = Channel[commands.Answer, commands.AnyCommand]


@dataclass(frozen=True)
class FollowerParts:
    """The components that execute commands."""

    kv: KvCache
    executor: StepExecutor
    sessions: FollowedSessions
    read: Callable[[AdapterRef, AdapterDigests | None], LoraWeights]
    """Reads this rank's shard of an adapter into host memory. Raises as `store.Load`."""
    placed: Callable[[LoraWeights], None] = lambda _: None
    """Called with each adapter that was copied into pages, as rank 0's store does: see `AdapterPages`."""


class Follower:
    """Executes commands until `Stop`, or until rank 0 is gone."""

    def __init__(
        self,
        channel: Commands,
        progress: Progress,
        *,
        measure_pool: Callable[[], int],
        build: Callable[[int], FollowerParts],
        jobs: int,
        start_thread: Callable[[], None] = lambda: None,
        outside: Callable[[], int] = lambda: 0,
    ) -> None:
        """`measure_pool`: returns the tokens that the page pool could hold; `build`: makes the components, given the
        pool's tokens. `jobs`: most jobs loaded at once. `start_thread` is called first on each thread that reads
        adapters or loads jobs. `outside`: returns the bytes of the GPU taken outside of this process's allocator."""
        self._commands, self._measure_pool, self._build = channel, measure_pool, build
        self._progress, self._outside = progress, outside
        self._least_outside: int | None = None
        self._built: FollowerParts | None = None
        self._readers = ThreadPoolExecutor(READERS, "adapters", start_thread)
        self._threads = ThreadPoolExecutor(2 * jobs, "jobs", start_thread)
        self._host = dict[AdapterRef, LoraWeights]()
        """Host copies of adapters."""
        self._in_pages = dict[AdapterRef, LoraWeights]()
        """Adapters in pages."""
        self._tables = PageTables()
        self._in_flight: list[StepInFlight] = []
        self._launched: list[StepInFlight] = []
        """Launched steps that are collected once their tokens are chosen."""
        self._loads = dict[int, _JobLoad]()
        """Job loads by the number of their `LoadJob`."""

    def run(self) -> None:
        """Execute commands. Raises `PeerLost`, and any command's error: the ranks cannot continue then."""
        for number in itertools.count(1):
            command = self._commands.receive()
            if isinstance(command, commands.Stop):
                return
            kind = type(command.verb if isinstance(command, commands.RunVerb) else command).__name__
            with self._progress.command(number, kind):
                self._execute(command)

    def _execute(self, command: commands.AnyCommand) -> None:
        match command:
            case commands.Launch():
                self._launch(self._tables.unpack(command))
            case commands.Choose(rows, words):
                self._choose(Masks.of(rows, words))
            case commands.Forget(sequence):
                self._tables.forget(sequence)
                self._parts.executor.forget(sequence)
            case commands.Prepare():
                with torch.no_grad():
                    self._parts.executor.prepare()
            case commands.LoadIntoPages():
                self._load_into_pages(command)
            case commands.DropAdapter(adapter, in_pages=True):
                del self._in_pages[adapter]
                self._parts.executor.evicted(adapter)
            case commands.DropAdapter(adapter):
                self._host.pop(adapter, None)
            case commands.Advance(load=load, micro_steps=micro_steps):
                found = self._parts.sessions.attempt(self._job(load), micro_steps)
                self._commands.send(commands.Answer(command.number, int(found.updated), found.code, found.message))
            case commands.ReleaseMemory():
                self._parts.sessions.release_memory()
            case commands.RunVerb(load, verb):
                with suppress(FailedTogether):  # a gathering that failed on some rank: rank 0 reports it
                    self._parts.sessions.run(self._job(load), verb)
            case commands.CopySnapshot():
                self._copy_snapshot(command)
            case commands.AbandonJob(load, how):
                if how is None:
                    self._parts.sessions.abandon(self._job(load))
                else:
                    self._parts.sessions.begin_again(self._job(load), how)
            case commands.DropJob(load):
                self._loads.pop(load).drop()
            case commands.LoadJob():
                self._load_job(command)
            case commands.ReadAdapter():
                self._answer(command.number, self._readers, lambda: self._read(command))
            case commands.MeasurePool():
                self._commands.send(commands.Answer(command.number, self._measure_pool()))
            case commands.ReadDevice():
                self._commands.send(commands.Answer(command.number, self._taken()))
            case commands.BuildEngine():
                self._built = self._build(command.tokens)
                self._commands.send(commands.Answer(command.number))
            case commands.Stop():
                raise AssertionError("handled by the caller")
            case _:
                assert_never(command)

    @property
    def _parts(self) -> FollowerParts:
        assert self._built is not None, "expected `BuildEngine` first"
        return self._built

    def _taken(self) -> int:
        now = self._outside()
        self._least_outside = now if self._least_outside is None else min(now, self._least_outside)
        return now - self._least_outside

    # ---- generation

    @torch.no_grad()
    def _launch(self, step: StepInput) -> None:
        """Launch a step in the order of `Generator.run`: collect the step in flight after the launch, then what does
        not overlap. Results are dropped; rank 0 has them."""
        parts = self._parts
        for own in step.sequences:
            written = -(-own.run.position // parts.kv.page_tokens)
            parts.kv.clear(own.run.pages[written:])  # as rank 0 did when it allocated them
        launched = parts.executor.launch(step, [self._in_pages[ref] for ref in step.adapters])
        for before in self._in_flight:
            before.collect()
        self._in_flight = [one for one in launched if one.overlaps]
        self._launched = [one for one in launched if not one.overlaps]
        if not any(own.sampling is not None and own.sampling.masked for own in step.sequences):
            self._collect_launched()

    def _collect_launched(self) -> None:
        launched, self._launched = self._launched, []
        for one in launched:
            one.collect()

    @torch.no_grad()
    def _choose(self, masks: Masks) -> None:
        self._parts.executor.choose(masks)
        self._collect_launched()

    # ---- adapters

    def _read(self, question: commands.ReadAdapter) -> int:
        self._host[question.adapter] = self._parts.read(question.adapter, question.digests)
        return 0

    def _load_into_pages(self, command: commands.LoadIntoPages) -> None:
        buffer, span = self._parts.kv.buffer, Span(command.first, command.pages, lambda: None)
        buffer.move(command.moved)
        placed = self._in_pages[command.adapter] = copied_into(buffer.of(span), self._host[command.adapter])
        self._parts.placed(placed)

    # ---- jobs

    def _job(self, load: int) -> str:
        return self._loads[load].begin()

    def _load_job(self, question: commands.LoadJob) -> None:
        load = self._loads[question.number] = _JobLoad(self._parts.sessions, question.spec)
        self._answer(question.number, self._threads, load.run)

    def _copy_snapshot(self, question: commands.CopySnapshot) -> None:
        copy = self._parts.sessions.gathered_copy(self._job(question.load))

        def work() -> int:
            weights = copy()
            if weights is not None:
                self._host[question.adapter] = weights
            return int(weights is not None)

        self._answer(question.number, self._threads, work)

    # ---- threads

    def _answer(self, number: int, threads: ThreadPoolExecutor, work: Callable[[], int]) -> None:
        """Run `work` on a thread, and answer with its result or its error."""

        def run() -> None:
            try:
                answer = commands.Answer(number, work())
            except CoserveError as error:
                answer = commands.Answer(number, code=error.code, message=error.message)
            except EngineFault as fault:  # rank 0 ends the engine
                answer = commands.Answer(number, code=commands.ENGINE_FAULT, message=str(fault))
            except Exception as error:  # noqa: BLE001 - rank 0 handles it
                code = RequestOutOfMemory.code if out_of_memory(error) else InternalError.code
                answer = commands.Answer(number, code=code, message=f"{type(error).__name__}: {error}")
            self._commands.send(answer)

        threads.submit(run)


class _JobLoad:
    """One load of a job: under way, loaded, or committed."""

    def __init__(self, sessions: FollowedSessions, spec: JobSpec) -> None:
        self._sessions, self._spec, self._cancellation = sessions, spec, Cancellation()
        self._loaded: LoadedSession | None = None
        self._begun = False

    def run(self) -> int:
        """Load the job, on a thread. Returns the step that it continues from."""
        self._loaded = loaded = self._sessions.load(self._spec, self._cancellation)
        return loaded.step

    def begin(self) -> str:
        """Commit the load unless it is committed; `run` must have ended. Returns the job's id."""
        if self._loaded is not None:
            self._loaded.commit()
            self._loaded, self._begun = None, True
        assert self._begun, f"job {self._spec.id} is not loaded"
        return self._spec.id

    def drop(self) -> None:
        self._cancellation.cancel()
        if self._begun:
            self._sessions.drop(self._spec.id)
