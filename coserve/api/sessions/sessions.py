"""Training sessions of clients: opened, called, closed, and ended when their client is gone."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from coserve.admission.ends import NO_SESSIONS, learns_ends
from coserve.admission.memory import check_fits
from coserve.api.adapters.catalog import refuse_base_name
from coserve.api.adapters.inspection import refuse_too_large
from coserve.api.node import Node
from coserve.api.sessions.session import ClientSession
from coserve.core import errors
from coserve.core.access.principal import principal
from coserve.core.cancellation import uncancelled
from coserve.core.limits import MAX_RANK
from coserve.core.link import jobs
from coserve.core.link.engine import DropAdapter
from coserve.core.link.link import FromEngine
from coserve.core.names import NAME_RULE, is_name
from coserve.core.training.schemas import Call, SaveAdapter, SaveState, SessionSpec
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import AdapterRef, LoraSettings
from coserve.lora.files.record import record_adapter
from coserve.lora.files.targets import resolve_targets
from coserve.state.durable import remove_dir
from coserve.state.session_states import read_state

SAMPLERS = 4
"""Number of unnamed copies of the weights that a session keeps in memory for sampling; older ones are dropped."""


class TrainingSessions:
    """All sessions of the current engine."""

    def __init__(self, node: Node) -> None:
        self._config, self._folder, self._registry, self._engine = node.config, node.folder, node.registry, node.engine
        self._sessions: dict[str, ClientSession] = {}
        self._closing: set[str] = set()
        """Sessions that were closed here and not yet in the engine."""

    def __contains__(self, id: str) -> bool:
        return id in self._sessions

    # ---- messages of the engine

    def deliver(self, message: FromEngine) -> bool:
        """Take a message about a session; False if it is about something else."""
        id = getattr(message, "id", "")
        session = self._sessions.get(id)
        if session is None:
            known = id in self._closing
            if isinstance(message, jobs.JobCancelled | jobs.JobFailed):
                self._closing.discard(id)
            return known
        match message:
            case jobs.CallDone() | jobs.CallFailed():
                session.answered(message)
            case jobs.JobStarted():
                session.waits = None
                if not session.opened.done():
                    session.opened.set_result(None)
            case jobs.JobWaiting(message=text):
                session.waits = text
            case jobs.JobFailed(code=code, message=text):
                self._end(session, errors.error_from_code(code, text))
            case jobs.JobCancelled() if session.cancelled is not None:
                session.cancelled.set_result(None)
            case _:
                pass
        return True

    def lost(self) -> None:
        """End all sessions, because the engine ended."""
        self._closing.clear()
        for session in tuple(self._sessions.values()):
            last = f"its last saved state is {session.saved}" if session.saved else "it was never saved"
            self._end(session, errors.SessionEnded(f"the engine stopped, and {session.name} was lost: {last}"))

    # ---- for clients

    async def open(
        self, id: str, name: str, lora: LoraSettings, seed: int, state: tuple[str, str] | None, *, with_optimizer: bool
    ) -> ClientSession:
        """Open a session, with a new adapter or with a saved state, and send it to the engine; `opened` tells when it
        is in memory. Raises `InvalidRequest`, `JobTooLarge`, `AdapterTooLarge`, `QueueFull`, `NotFound`,
        `EngineUnavailable`."""
        base = self._engine.spec
        if self._config.tp > 1:
            raise errors.InvalidRequest(f"training sessions need one GPU: expected --tp 1, got {self._config.tp}")
        if not 1 <= lora.r <= MAX_RANK:
            raise errors.InvalidRequest(f"expected 1 to {MAX_RANK}, got {lora.r}", field="rank")
        if learns_ends(lora, base):
            raise errors.InvalidRequest(NO_SESSIONS, field="targets")
        await asyncio.to_thread(resolve_targets, lora, base)
        tokens = min(self._config.micro_batch_tokens, base.context)
        spec = session_spec(id, lora, seed, tokens, state, with_optimizer=with_optimizer)
        await refuse_too_large(id, lora, base, self._engine.pool, self._config, field="rank")
        if (memory := self._engine.memory) is not None:
            await asyncio.to_thread(check_fits, spec, base, memory, self._config.micro_batch_tokens)
        if len(self._sessions) >= self._config.max_sessions:
            raise errors.QueueFull(
                f"{len(self._sessions)} training sessions are open; the daemon takes as many (max_sessions)"
            )
        session = self._sessions[id] = ClientSession(spec, name)
        try:
            self._engine.send(jobs.OpenSession(spec=spec))
        except errors.EngineUnavailable:
            del self._sessions[id]
            raise
        self.touch(session)
        self._watch(session)
        return session

    def find(self, id: str) -> ClientSession | None:
        """Return an open session that the principal sees."""
        found = self._sessions.get(id)
        return found if found is not None and principal().sees(found.project) else None

    def touch(self, session: ClientSession) -> None:
        """Restart the session's idle timeout, since its client is alive."""
        session.used = time.monotonic()

    async def call(self, session: ClientSession, call: Call) -> jobs.CallDone:
        """Execute a call after the session's earlier ones. Raises the engine's error, and `SessionEnded`."""
        async with session.order:
            await session.opened
            answer = self._send(session, call)
        return await answer

    async def save_state(self, session: ClientSession, name: str, shown: str, *, overwrite: bool) -> None:
        """Save weights and moments as `name`, durably. `shown`: the state's name in messages. Raises `InvalidRequest`,
        `StorageError`."""
        run = session.spec.id
        check_name(name)
        async with session.order:
            if not overwrite and await asyncio.to_thread(self._folder.session_state(run, name).exists):
                raise errors.InvalidRequest(f"{shown} exists: expected another name, or overwrite", field="path")
            await session.opened
            answer = self._send(session, SaveState(run, name, session.project))
        await answer
        session.saved = shown

    async def save_adapter(self, session: ClientSession, name: str) -> AdapterRef:
        """Publish the weights as the next version of adapter `name`, durably. Raises `InvalidRequest`,
        `StorageError`."""
        refuse_base_name(name, self._engine.spec, field="path")
        async with session.order:
            await session.opened
            ref = await self._registry(lambda registry: registry.reserve_version(name))
            answer = self._send(session, SaveAdapter(ref, files=True))
        # the engine writes the files, whether or not the client stays
        return await uncancelled(asyncio.create_task(self._add_adapter(ref, f"job:{session.spec.id}", answer)))

    async def _add_adapter(self, ref: AdapterRef, source: str, answer: asyncio.Future[jobs.CallDone]) -> AdapterRef:
        """Register the adapter once `answer` says that its files are written; delete them if that fails."""
        await answer
        path = self._folder.adapter(ref)
        describe = partial(record_adapter, path, ref, self._engine.spec, source=source, created_at=time.time())
        try:
            record = await asyncio.to_thread(describe)
            await self._registry(lambda registry: registry.add_adapter(record))
        except BaseException:
            self._engine.offer(DropAdapter(ref=ref))
            await asyncio.to_thread(remove_dir, path)
            raise
        return ref

    async def sampler(self, session: ClientSession) -> AdapterRef:
        """Copy the weights to an adapter in the engine's memory, without files. A session keeps its last `SAMPLERS`."""
        async with session.order:
            await session.opened
            number = session.samplers[-1].version + 1 if session.samplers else 1
            ref = AdapterRef(f"{session.spec.id}:sampler", number)
            session.samplers.append(ref)
            answer = self._send(session, SaveAdapter(ref, files=False))
        await answer
        while len(session.samplers) > SAMPLERS:
            self._engine.send(DropAdapter(ref=session.samplers.popleft()))
        return ref

    async def load(self, session: ClientSession, state: tuple[str, str], *, with_optimizer: bool) -> None:
        """Replace weights and moments by a saved state's, after the session's earlier calls. Raises `NotFound`,
        `InvalidRequest` for a state of another shape, `SessionEnded`."""
        async with session.order:
            saved = await asyncio.to_thread(read_state, self._folder, *state)
            if (saved.lora.r, saved.lora.targets) != (session.spec.lora.r, session.spec.lora.targets):
                raise errors.InvalidRequest("expected a state with the session's rank and targets", field="path")
            await session.opened
            await session.idle()
            if session.ended is not None:
                raise session.ended
            loop = asyncio.get_running_loop()
            session.cancelled, session.opened = loop.create_future(), loop.create_future()
            self._engine.send(jobs.CancelJob(id=session.spec.id))
            await session.cancelled
            session.cancelled = None
            seed, lora, most = session.spec.training.seed, session.spec.lora, session.spec.tokens
            spec = session_spec(session.spec.id, lora, seed, most, state, with_optimizer=with_optimizer)
            if session.ended is None:
                self._engine.send(jobs.OpenSession(spec=spec))
            await session.opened

    def close(self, session: ClientSession, why: errors.CoserveError | None = None) -> None:
        """End a session and free its memory. A second call does nothing."""
        if session.ended is None:
            if self._engine.offer(jobs.CancelJob(id=session.spec.id)):
                self._closing.add(session.spec.id)
            self._end(session, why or errors.SessionEnded(f"{session.name} was closed"))

    # ---- own

    def _send(self, session: ClientSession, call: Call) -> asyncio.Future[jobs.CallDone]:
        if session.ended is not None:
            raise session.ended
        self.touch(session)
        number, answer = session.begin()
        self._engine.send(jobs.CallSession(id=session.spec.id, number=number, call=call))
        return answer

    def _end(self, session: ClientSession, error: errors.CoserveError) -> None:
        self._sessions.pop(session.spec.id, None)
        session.end(error)
        for ref in session.samplers:
            self._engine.offer(DropAdapter(ref=ref))

    def _watch(self, session: ClientSession) -> None:
        """End the session once its client has sent nothing for `session_timeout` seconds."""
        limit = self._config.session_timeout
        if session.ended is not None or limit == 0:
            return
        if session.busy:
            self.touch(session)
        left = session.used + limit - time.monotonic()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._watch, session)
        else:
            last = f"; its last saved state is {session.saved}" if session.saved else ""
            self.close(
                session, errors.SessionEnded(f"{session.name} ended: no sign of its client for {limit:.0f} s{last}")
            )


def session_spec(
    id: str, lora: LoraSettings, seed: int, tokens: int, state: tuple[str, str] | None, *, with_optimizer: bool
) -> SessionSpec:
    """Return the engine's specification of a session. `tokens`: most tokens of a micro-batch."""
    return SessionSpec(
        id=id,
        adapter=id,
        version=0,
        init_from=None,
        lora=lora,
        training=TrainingSettings(seed=seed, batch_tokens=tokens),
        rows=1,
        tokens=tokens,
        target_tokens=tokens,
        longest=tokens,
        state=state,
        with_optimizer=with_optimizer,
    )


def check_name(name: str) -> None:
    """Raise `InvalidRequest` unless `name` can be that of saved weights."""
    if not is_name(name):
        raise errors.InvalidRequest(f"expected {NAME_RULE}, got {name[:80]!r}", field="path")
