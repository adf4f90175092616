"""coserve's own API of training sessions, `/sessions`: each call is answered when it has been executed."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from aiohttp import web

from coserve.api.http.bodies import BodyReader
from coserve.api.http.route import Route, Schema
from coserve.api.service import Service
from coserve.api.sessions.session import ClientSession
from coserve.core.errors import CoserveError, InvalidRequest, NotFound
from coserve.core.link.jobs import CallDone
from coserve.core.training import schemas
from coserve.core.training.schemas import Compute, Step
from coserve.core.types import LoraSettings
from coserve.data.corpus.batch import Example, examples_out
from coserve.state.session_states import read_state


def _call_route(name: str, summary: str, body: Schema | None = None) -> Route:
    return Route("POST", f"/sessions/{{id}}/{name}", summary, body=body, errors=(410, 422, 507))


class SessionsApi:
    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._sessions, self._bodies = service, service.sessions, bodies

    @Route("POST", "/sessions", "Open a training session, whose steps come from you", errors=(404, 410, 422))
    async def open_session(self, body: schemas.SessionRequest) -> schemas.Session:
        id, lora, seed, state = f"session-{secrets.token_hex(6)}", LoraSettings(), body.seed, None
        if body.state is None:
            lora = LoraSettings(r=body.r, alpha=body.alpha, targets=body.targets)
        else:
            run, _, name = body.state.partition("/")
            with named("state"):
                saved = await asyncio.to_thread(read_state, self._service.folder, run, name)
            lora, seed, state = saved.lora, saved.seed, (run, name)
        with named():
            session = await self._sessions.open(id, id, lora, seed, state, with_optimizer=body.with_optimizer)
        try:
            await session.opened
        except asyncio.CancelledError:  # its client has left, and cannot know its id
            self._sessions.close(session)
            raise
        return _view(session)

    @Route("GET", "/sessions/{id}", "Show a session")
    async def get_session(self, id: str) -> schemas.Session:
        return _view(self._session(id))

    @Route("DELETE", "/sessions/{id}", "End a session and free its memory")
    async def close_session(self, id: str) -> schemas.ClosedSession:
        session = self._session(id)
        self._sessions.close(session)
        return schemas.ClosedSession(id=session.spec.id)

    @_call_route("forward_backward", "Add the gradients of a batch's loss", schemas.ComputeRequest)
    async def forward_backward(self, request: web.Request, id: str) -> schemas.ComputeResult:
        return await self._compute(request, id, learns=True)

    @_call_route("forward", "Compute a batch's loss", schemas.ComputeRequest)
    async def forward(self, request: web.Request, id: str) -> schemas.ComputeResult:
        return await self._compute(request, id, learns=False)

    @_call_route("optim_step", "Update the weights")
    async def optim_step(self, id: str, body: schemas.OptimStepRequest) -> schemas.OptimStepResult:
        metrics = (await self._sessions.call(self._session(id), Step(body))).metrics
        return schemas.OptimStepResult(grad_norm=metrics["grad_norm"], step=int(metrics["step"]))

    @_call_route("save", "Save weights and moments")
    async def save_session(self, id: str, body: schemas.SaveStateRequest) -> schemas.SavedState:
        session = self._session(id)
        state = f"{session.spec.id}/{body.name}"
        with named("name"):
            await self._sessions.save_state(session, body.name, state, overwrite=body.overwrite)
        return schemas.SavedState(state=state)

    @_call_route("publish", "Publish the weights as an adapter")
    async def publish_session(self, id: str, body: schemas.PublishRequest) -> schemas.PublishedAdapter:
        with named("adapter"):
            ref = await self._sessions.save_adapter(self._session(id), body.adapter)
        return schemas.PublishedAdapter(adapter=ref.id, version=ref.version)

    async def _compute(self, request: web.Request, id: str, *, learns: bool) -> schemas.ComputeResult:
        session = self._session(id)  # before a large body
        body = await self._bodies.read(request, schemas.ComputeRequest)
        call, counts = await asyncio.to_thread(_call, body, learns)
        with named():
            done = await self._sessions.call(session, call)
        return await asyncio.to_thread(_result, done, counts)

    def _session(self, id: str) -> ClientSession:
        found = self._sessions.find(id)
        if found is None:
            raise NotFound(f"no training session {id[:80]!r}: it has ended", field="id")
        return found


@contextmanager
def named(path: str = "path") -> Iterator[None]:
    """Rename the fields in errors from Tinker's names to those of `/sessions`. `path`: the name for Tinker's `path`."""
    try:
        yield
    except CoserveError as error:
        names = {"rank": "r", "loss_fn": "loss", "loss_fn_config": "config", "data": "examples", "path": path}
        field, _, message = error.message.partition(": ")
        if error.field is None and field in names:  # from the engine, whose text begins with the field
            error.field, error.message = field, message
        error.field = names.get(error.field or "", error.field)
        raise


def _view(session: ClientSession) -> schemas.Session:
    lora = session.spec.lora
    targets = None if lora.targets is None else list(lora.targets)
    return schemas.Session(id=session.spec.id, rank=lora.r, targets=targets, seed=session.spec.training.seed)


def _call(body: schemas.ComputeRequest, learns: bool) -> tuple[Compute, list[int]]:
    """Return the call, and each example's number of targets. Many small examples take long: run it in a thread."""
    found = []
    for number, one in enumerate(body.examples):
        after = range(len(one.tokens)) if one.after is None else one.after
        if len(after) != len(one.labels):
            got = len(one.labels)
            raise InvalidRequest(f"example {number}: expected {len(after)} labels, got {got}", field="labels")
        weights, sampled, advantages, ratio_mask = (
            None if each is None else np.array(each, np.float32)
            for each in (one.weights, one.sampled, one.advantages, one.ratio_mask)
        )
        tokens, labels = np.array(one.tokens, np.int32), np.array(one.labels, np.int64)
        found.append(Example(tokens, np.array(after, np.int64), labels, weights, sampled, advantages, ratio_mask))
    counts = [len(example.after_K) for example in found]
    return Compute(examples_out(found), body.loss, body.config, learns), counts


def _result(done: CallDone, counts: list[int]) -> schemas.ComputeResult:
    parts = np.split(np.frombuffer(done.values, np.float32), np.cumsum(counts)[:-1])
    return schemas.ComputeResult(loss=done.metrics["loss:sum"], log_probs=[part.tolist() for part in parts])
