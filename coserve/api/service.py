"""The API process without HTTP: requests, jobs, adapters, and one connection to the engine.

Engine messages about requests are delivered at once; those about jobs go through the recorder, so that a token never
waits for a disk. The registry is written before any client is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from coserve import __version__
from coserve.api.access.access import Access
from coserve.api.adapters.aliases import AliasApi
from coserve.api.adapters.catalog import AdapterCatalog
from coserve.api.adapters.conversion import Conversions
from coserve.api.adapters.scrub import Scrub
from coserve.api.documents.asking import Asker
from coserve.api.documents.jobs import DocumentJobs
from coserve.api.engine_client import EngineClient
from coserve.api.generation.async_tokenizer import AsyncTokenizer
from coserve.api.generation.in_flight import MAX_PROMPT_SCORES, InFlightRequests
from coserve.api.generation.stop_tokens import turn_notes
from coserve.api.jobs.evaluation import JobEvaluation
from coserve.api.jobs.manager import JobManager
from coserve.api.jobs.recorder import JobRecorder
from coserve.api.jobs.sampling import JobSampler
from coserve.api.metrics.prometheus import Metrics
from coserve.api.node import Node
from coserve.api.page.history import ReportHistory
from coserve.api.sessions.sessions import TrainingSessions
from coserve.api.stopping import Stopping
from coserve.api.tracking.feed import CLOSING, TrackerFeed
from coserve.config import Config
from coserve.core.errors import EngineUnavailable
from coserve.core.health import BaseInfo, EngineRanks, Health
from coserve.core.link.engine import EngineNotes, EngineReady, EngineRefused, EngineStopped, EngineWarming
from coserve.core.link.generation import Admitted, RequestFailed, Tokens
from coserve.core.link.jobs import CallDone, CallFailed, JobCancelled, JobFailed, JobPaused, JobSnapshot
from coserve.core.link.link import FromEngine, Link, PeerLost, ToEngine
from coserve.core.link.stats import EngineStats
from coserve.core.sampling import NEUTRAL, SamplingDefaults
from coserve.data.offload.pool import HelperPool
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.files import FileStore
from coserve.state.folder import DataFolder
from coserve.state.registry.records import JobRecord
from coserve.state.thread import RegistryThread

log = logging.getLogger(__name__)

STOPPING = "the daemon is stopping; try again later"
LONG_WAIT = 10.0
"""Seconds that work may wait before `/health` reports it."""
LOSS_SECONDS = 1.0
"""Most seconds to wait, after rank 0's link closed, to learn how its process ended."""
MAX_BODY_HELPERS = 2
"""Helper processes that decode large bodies."""
CHAT_HELPERS = 2
"""Helper processes that render chats."""


class Service:
    """The service. It starts without an engine; `attach` connects one, also after an engine died."""

    def __init__(
        self,
        config: Config,
        folder: DataFolder,
        registry: RegistryThread,
        tokenizer: Tokenizer,
        engine: EngineClient | None = None,
        *,
        sampling_defaults: SamplingDefaults = NEUTRAL,
        max_prompt_scores: int = MAX_PROMPT_SCORES,
        closing: float = CLOSING,
    ) -> None:
        """`engine`: an existing client, which has recorded the engine's start-up so far; None: a new one.
        `sampling_defaults`: the base's own, for requests of clients that leave them out.
        `max_prompt_scores`: most prompt log-probabilities that all requests in flight may ask for together. `closing`:
        seconds that a tracker may take when the service closes."""
        self.folder, self.tokenizer, self.sampling_defaults = folder, tokenizer, sampling_defaults
        self.files = FileStore(folder.files)
        self._config = config
        self.engine = engine or EngineClient()
        self.access = Access(config.api_key, registry, self.files, self.engine)
        node = Node(config, folder, registry, tokenizer, self.engine)
        self.metrics = Metrics(self.engine.name)
        self.history = ReportHistory()
        self._registry = registry
        self.recorder = JobRecorder(node, self.metrics)
        self.helpers = HelperPool(tokenizer.state, MAX_BODY_HELPERS, config.logs)
        self._preparers = HelperPool(tokenizer.state, config.tokenizer_processes, config.logs)
        self.chats = HelperPool(tokenizer.state, CHAT_HELPERS, config.logs)
        self.texts = AsyncTokenizer(tokenizer, self.helpers, self.chats)
        self.generation = InFlightRequests(node, self.texts, self.metrics, max_prompt_scores=max_prompt_scores)
        self.generation.charge = self.access.quotas.charge
        asker = Asker(self.generation, self.texts, self.engine)
        documents = DocumentJobs(node, self.texts, asker, self.recorder)
        tests = JobEvaluation(node, asker, self.recorder)

        async def evaluate(record: JobRecord, snapshot: JobSnapshot) -> bool:
            return await documents.evaluate(record, snapshot) and await tests.evaluate(record, snapshot)

        self._sampler = JobSampler(node, self.generation, self.recorder.deliver, evaluate)
        self.background: list[Callable[[], Awaitable[None]]] = [documents.close]
        """Functions that stop the daemon's own work that sends requests; it resumes after the next start."""
        self.stopping = Stopping()
        self.sessions = TrainingSessions(node)
        self.jobs = JobManager(node, self._preparers, self.recorder, self.stopping, documents)
        self.scrub = Scrub(node)
        self.adapters = AdapterCatalog(node, self._preparers, self.generation.in_use, self.scrub)
        self.aliases = AliasApi(node)
        converters = HelperPool(tokenizer.state, 1, config.logs, max_memory=0)
        self.conversions = Conversions(node, converters, self.adapters, self.jobs.submit)
        own = (config.tracking_dir or folder.tracking).absolute()
        self._trackers = [
            TrackerFeed(name, own / name, registry, HelperPool(tokenizer.state, 1, config.logs), closing=closing)
            for name in dict.fromkeys(config.tracker)
        ]
        for tracker in self._trackers:
            self.recorder.watchers.subscribe(tracker.notify)
        self._started_monotonic, self.started_at = time.monotonic(), time.time()
        self._receiver: asyncio.Task[Exception | None] | None = None
        """Task that reads the messages of the last engine."""
        self._recording: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Make the registry and the files agree, before the first request. A second call does nothing.

        Raises `StartupError` if the registry is damaged.
        """
        if self._recording is None:
            self._recording = asyncio.create_task(self.recorder.run())
            await self.jobs.recover()
            await asyncio.to_thread(self.files.load)
            await self.access.load()
            await self._registry.read(lambda registry: registry.notes())  # later there may be no descriptors for it
            for tracker in self._trackers:
                tracker.open()
            self.adapters.open()
            self.scrub.open()

    async def attach(
        self, link: Link[ToEngine, FromEngine], ready: EngineReady, ranks: EngineRanks | None = None
    ) -> None:
        """Connect a new engine and send it the unfinished jobs, oldest first. `ranks`: its processes, if there are
        several. Raises as `open`."""
        await self.open()
        self.engine_lost()
        await self.jobs.attach(lambda: self._open(link, ready, ranks))

    def _open(self, link: Link[ToEngine, FromEngine], ready: EngineReady, ranks: EngineRanks | None) -> None:
        self.engine.open(link, ready, ranks)
        self._receiver = asyncio.create_task(self._receive(link))
        self.generation.warm_set.read()

    def engine_lost(self) -> None:
        """Handle the engine's end: requests in flight end with `EngineUnavailable`, jobs wait for the next engine."""
        if not self.engine.alive:
            return
        if self._receiver is not None and self._receiver is not asyncio.current_task():
            self._receiver.cancel()
        self.engine.lost()
        self.metrics.engine.report(None)
        loss = None if self.engine.ranks is None else self.engine.ranks.loss
        why = "the engine stopped while it ran this request" + ("" if loss is None else f": {loss}")
        self.generation.fail_all(EngineUnavailable(why))
        self.sessions.lost()
        self.recorder.watchers.notify_all()  # pauses and cancellations must not wait for the next engine

    async def engine_hung(self) -> str:
        """Wait until the attached engine hangs, then return a description."""
        limit = self._config.engine_timeout
        await self.engine.hung(limit)
        return f"it said nothing for {limit:.0f} s, though it had work"

    def engine_failed(self, note: str, *, started: bool) -> None:
        """Record that the engine died and is being restarted. `note` says why; `started`: it had become ready."""
        self.engine.failed(note, started=started)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests with `EngineUnavailable`, end streams of jobs' events, uploads, corpora and the daemon's
        own requests, and wait for the other requests in progress, at most `seconds`."""
        if seconds == 0:
            return
        stopping = EngineUnavailable(STOPPING)
        self.access.close(stopping)
        self.stopping.stop(stopping)
        self.recorder.watchers.notify_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(end() for end in self.background))
                await self.access.idle.wait()

    def stop(self) -> None:
        """Begin to stop: requests in flight and new ones fail with `EngineUnavailable`, event streams end, and so do
        uploads and corpora that are not accepted as jobs yet."""
        stopping = EngineUnavailable(STOPPING)
        self.generation.stop(stopping)
        self.stopping.stop(stopping)
        self.recorder.watchers.notify_all()

    async def close(self) -> None:
        """Write every message that the engine sent; requests in flight fail with `EngineUnavailable`."""
        await self.jobs.close()
        await self.conversions.close()
        await self.adapters.close()
        await self.generation.warm_set.close()
        self.scrub.close()
        await self.helpers.close()
        await self.chats.close()
        await self._preparers.close()
        await self._sampler.close()
        await self.recorder.settled()
        await self.recorder.close()
        await asyncio.gather(*(tracker.close() for tracker in self._trackers))
        self.engine_lost()
        if self._recording is not None:
            self._recording.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._recording

    async def disconnected(self) -> Exception | None:
        """Wait until the engine's messages are no longer read. Returns the error that ended the reading; None if the
        link closed."""
        if (receiver := self._receiver) is None:
            return None
        await asyncio.wait({receiver})
        return None if receiver.cancelled() else receiver.result()

    async def _receive(self, link: Link[ToEngine, FromEngine]) -> Exception | None:
        try:
            while True:
                self._dispatch(await link.receive())
        except PeerLost:
            log.info("the link to the engine closed")
            if (ranks := self.engine.ranks) is not None:  # how rank 0's process ended is known a little later
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ranks.lost.wait(), LOSS_SECONDS)
            return None
        except Exception as error:  # any kind: the engine is lost, as what it sends is not understood
            log.exception("a message of the engine cannot be read")
            return error
        finally:
            if self._receiver is asyncio.current_task():  # no later engine is attached
                self.engine_lost()

    def _dispatch(self, message: FromEngine) -> None:
        self.engine.received(message)
        if self.sessions.deliver(message):
            return
        match message:
            case Tokens() | RequestFailed() | Admitted():
                self.generation.deliver(message)
            case EngineStats():
                self.metrics.engine.report(message)
                self.history.report(message, self.jobs.unfinished)
            case EngineNotes():
                self.engine.note(message.notes)
            case EngineStopped():
                log.info("the engine stopped")
            case EngineReady() | EngineRefused() | EngineWarming():
                log.warning("the engine answered twice whether it is ready")
            case JobSnapshot():
                self._sampler.begin(message)
            case JobPaused() | JobCancelled() | JobFailed():
                self._sampler.cancel(message.id)  # first, because no sample may follow a job's end
                self.recorder.deliver(message)
            case CallDone() | CallFailed():
                pass
            case _:
                self.recorder.deliver(message)

    @property
    def ready(self) -> bool:
        """Whether a load balancer should send requests here: the answer of `GET /health/ready`."""
        return self.engine.alive and not self.engine.silence and self.stopping.error is None

    def health(self) -> Health:
        """Return the response of `GET /health`."""
        ready, stats = self.engine.ready, self.engine.stats
        spec = ready.spec if ready is not None else None
        ttft, tpot = (None, None) if spec is None else self._config.targets(device=spec.device)
        return Health(
            status=self.engine.status if self.stopping.error is None else "stopping",
            version=__version__,
            uptime=time.monotonic() - self._started_monotonic,
            engine_alive=self.engine.alive,
            engine_restarts=self.engine.restarts,
            base=None if spec is None else msgspec.convert(spec, BaseInfo, from_attributes=True),
            lora_backend=ready.lora_backend if ready is not None else None,
            kv_tokens=ready.kv_tokens if ready is not None else None,
            notes=[
                *self.access.notes,
                *self.engine.troubles,
                *self.engine.silence,
                *(turn_notes(self.tokenizer) if self.texts.template_read else ()),
                *(ready.notes if ready is not None else ()),
                *(stats.troubles if stats is not None else ()),
                *_starving(stats),
                *self._registry.notes,
                *self.recorder.notes,
                *self.scrub.notes,
                *(note for tracker in self._trackers for note in tracker.notes),
            ],
            waiting=stats.waiting if stats is not None else 0,
            running=stats.running if stats is not None else 0,
            jobs=self.jobs.unfinished,
            adapters_resident=len(stats.resident) if stats is not None else 0,
            host_adapter_bytes=stats.host_adapter_bytes if stats is not None else 0,
            host_adapter_limit=ready.host_adapter_limit if ready is not None else 0,
            warming=self.engine.warming,
            tp=self._config.tp,
            ep=self._config.ep,
            ranks=[*self.engine.rank_states],
            lora_servers=[] if stats is None else [*stats.lora_servers],
            memory=stats.memory if stats is not None else None,
            policy=self._config.resolved(device=spec.device).policy if spec is not None else None,
            slo_ttft=ttft,
            slo_tpot=tpot,
        )


def _starving(stats: EngineStats | None) -> tuple[str, ...]:
    """Return notes on work that waits for long, and why training hardly advances; empty if neither happens."""
    if stats is None:
        return ()
    waits = {"the oldest request in the queue": stats.request_waits, "training": stats.training_waits}
    found = tuple(f"{who} has waited for {seconds:.0f} s" for who, seconds in waits.items() if seconds > LONG_WAIT)
    if (why := stats.starving) is None:
        return found
    micro_step, slack = round(1000 * why.micro_step), round(1000 * why.slack)
    since = f"for {why.seconds:.0f} s training has run only by train_patience and train_floor"
    return (*found, f"{since}: a micro-step is predicted to take {micro_step} ms, the slack is {slack} ms")
