"""The handlers of Tinker's API: one method per route, named as in the SDK with `tinker_` before it."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from aiohttp import web

from coserve.api.adapters.filters import AdapterFilter
from coserve.api.http.bodies import BodyReader
from coserve.api.http.responses import ErrorFormat, error_info, json_response
from coserve.api.http.route import BODY_ERRORS, Route, Schema
from coserve.api.service import Service
from coserve.api.tinker import schemas
from coserve.api.tinker.calls import decode_call
from coserve.api.tinker.futures import Futures, Result
from coserve.api.tinker.paths import SCHEME, SavedPath, check_base, parse_path, run_of
from coserve.api.tinker.runs import Run, Runs, SamplerTarget, opened
from coserve.api.tinker.sampling import request_of, sample
from coserve.api.tinker.wire import PROTOBUF, expanded
from coserve.core.errors import CoserveError, InvalidRequest
from coserve.state.durable import remove_dir
from coserve.state.session_states import read_state, saved_states

UNEMBEDDING = "LoRA of the unembedding is not available: train_unembed is ignored"
RESULTS: Schema = (schemas.TryAgain, schemas.TinkerError, schemas.ModelResult, schemas.StepResult, schemas.PathResult)
CallT = TypeVar("CallT", bound=schemas.Body)


def tinker_error(error: CoserveError) -> schemas.TinkerError:
    """Return the error in Tinker's format: a text that names the field, and the category, `user` or `server`."""
    info = error_info(error)
    message = info.message if info.field is None or info.field in info.message else f"{info.field}: {info.message}"
    return schemas.TinkerError(message, "user" if error.status < 500 else "server")


TINKER_ERRORS = ErrorFormat(schemas.TinkerError, tinker_error, bad_request=422)
"""The SDK sends a request again that had status 400, as if a proxy had refused it."""


def _route(method: str, path: str, summary: str, errors: tuple[int, ...] = (), *, slashes: bool = False) -> Route:
    path, summary, formats = f"/api/v1/{path}", f"Tinker: {summary}", (TINKER_ERRORS,)
    return Route(method, path, summary, dialect=True, errors=errors, error_formats=formats, slashes=slashes)


def _post(
    path: str, summary: str, *, body: Schema | None = None, response: Schema | None = None, compressed: bool = False
) -> Route:
    route = _route("POST", path, summary, (*BODY_ERRORS, 404, 410, 422))
    return replace(route, body=body, response=response, compressed=compressed)


class TinkerApi:
    """`close` ends the requests in flight."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies
        self._runs, self._futures = Runs(service), Futures()

    async def close(self) -> None:
        await self._futures.close()

    # ---- the service

    @_route("GET", "healthz", "Whether the daemon answers")
    async def tinker_healthz(self) -> schemas.TinkerHealth:
        return schemas.TinkerHealth()

    @_post("client/config", "Settings of the SDK")
    async def tinker_client_config(self, body: schemas.TinkerConfigRequest) -> schemas.TinkerConfig:
        return schemas.TinkerConfig()

    @_post("client/dynamic_config", "Further ones")
    async def tinker_dynamic_config(self, body: schemas.TinkerConfigRequest) -> schemas.TinkerDynamicConfig:
        return schemas.TinkerDynamicConfig()

    @_post("telemetry", "Reports of the SDK, which are dropped")
    async def tinker_telemetry(self) -> schemas.Accepted:
        """Accept the SDK's reports of itself, and keep nothing."""
        return schemas.Accepted()

    @_route("GET", "get_server_capabilities", "The base")
    async def tinker_capabilities(self) -> schemas.Capabilities:
        base = self._service.engine.spec
        names = [base.name] if base.hub_name in (None, base.name) else [base.name, str(base.hub_name)]
        return schemas.Capabilities(
            [schemas.SupportedModel(name, self._service.engine.max_model_len) for name in names]
        )

    # ---- sessions

    @_post("create_session", "Begin a session")
    async def tinker_create_session(self, body: schemas.CreateSession) -> schemas.TinkerSession:
        return schemas.TinkerSession(self._runs.new_owner(), info_message=UNEMBEDDING)

    @_post("session_heartbeat", "Keep a session's models in memory")
    async def tinker_session_heartbeat(self, body: schemas.OfSession) -> schemas.Heartbeat:
        self._runs.touch(body.session_id)
        return schemas.Heartbeat()

    @_post("sessions/{id}/finish", "End a session")
    async def tinker_finish_session(self, id: str, body: schemas.FinishSession) -> schemas.Accepted:
        self._runs.finish(id)
        return schemas.Accepted()

    # ---- models

    @_post("create_model", "Begin to train an adapter")
    async def tinker_create_model(self, body: schemas.CreateModel) -> schemas.TinkerFuture:
        id = f"{body.session_id}:train:{body.model_seq_id}:0"
        if id not in self._futures:
            run = self._runs.add(body.session_id, body.model_seq_id)
            self._futures.start(id, self._runs.create(run, body))
        return schemas.TinkerFuture(id)

    @_post("unload_model", "Free a model's memory")
    async def tinker_unload_model(self, body: schemas.OfModel) -> schemas.TinkerFuture:
        run = self._runs.run(body.model_id)

        async def unload() -> Result:
            self._runs.unload(run)
            return schemas.ModelResult(run.model, "unload_model")

        id = f"{run.model}:unload:{secrets.token_hex(4)}"
        self._futures.start(id, unload())
        return schemas.TinkerFuture(id, run.model)

    @_post("get_info", "Show a model")
    async def tinker_get_info(self, body: schemas.OfModel) -> schemas.ModelInfo:
        run, base = self._runs.run(body.model_id), self._service.engine.spec
        data = schemas.ModelData(base.family, run.base, base.hub_name or run.base)
        return schemas.ModelInfo(run.model, data, run.base, opened(run).spec.lora.r)

    @_post("forward_backward", "Forward and backward; the body is protobuf", compressed=True)
    async def tinker_forward_backward(self, request: web.Request) -> schemas.TinkerFuture:
        encoding = request.headers.get("Content-Encoding", "")
        async with self._bodies.body(request) as body:
            call = await self._bodies.decode(await asyncio.to_thread(expanded, body, encoding), decode_call)
        run = self._runs.run(call.model_id)
        return self._ordered(run, call.seq_id, self._runs.forward_backward(run, call))

    @_post("optim_step", "Update the weights", body=schemas.OptimStep)
    async def tinker_optim_step(self, request: web.Request) -> schemas.TinkerFuture:
        body = await self._read_call(request, schemas.OptimStep)
        run = self._runs.run(body.model_id)
        return self._ordered(run, body.seq_id, self._runs.optim_step(run, body))

    @_post("save_weights", "Save weights and moments", body=schemas.SaveWeights)
    async def tinker_save_weights(self, request: web.Request) -> schemas.TinkerFuture:
        body = await self._read_call(request, schemas.SaveWeights)
        run = self._runs.run(body.model_id)
        return self._ordered(run, body.seq_id, self._runs.save(run, body))

    @_post("load_weights", "Load a saved state", body=schemas.LoadWeights)
    async def tinker_load_weights(self, request: web.Request) -> schemas.TinkerFuture:
        body = await self._read_call(request, schemas.LoadWeights)
        if body.model_id is not None:
            run = self._runs.run(body.model_id)
            return self._ordered(run, body.seq_id, self._runs.load(run, body))
        if body.session_id is None or body.model_seq_id is None:
            raise InvalidRequest("expected model_id, or session_id and model_seq_id", field="model_id")
        id = f"{body.session_id}:train:{body.model_seq_id}:0"
        if id not in self._futures:
            run = self._runs.add(body.session_id, body.model_seq_id)
            self._futures.start(id, self._runs.create_from_state(run, body))
        return schemas.TinkerFuture(id)

    @_post("save_weights_for_sampler", "Serve a model's weights", body=schemas.SaveForSampler)
    async def tinker_save_weights_for_sampler(self, request: web.Request) -> schemas.TinkerFuture:
        body = await self._read_call(request, schemas.SaveForSampler)
        run = self._runs.run(body.model_id)
        return self._ordered(run, body.seq_id, self._runs.save_for_sampler(run, body))

    async def _read_call(self, request: web.Request, type: type[CallT]) -> CallT:
        """Read the body of a model's request. An invalid request still takes its turn: later ones would wait for it
        forever."""
        async with self._bodies.body(request) as body:
            try:
                return await self._bodies.decode(body, type, dialect=True)
            except CoserveError as error:
                with suppress(CoserveError):
                    call = await self._bodies.decode(body, schemas.numbered)
                    self._ordered(self._runs.run(call.model_id), call.seq_id, refused(error))
                raise

    def _ordered(self, run: Run, number: int | None, work: Coroutine[Any, Any, Result]) -> schemas.TinkerFuture:
        """Begin a request of a model in its turn, and answer with its id."""
        try:
            if number is None or number < 1:
                raise InvalidRequest(f"expected the number of the request, from 1, got {number}", field="seq_id")
            id = f"{run.model}:{number}"
            waits = None if id in self._futures else run.order.in_turn(number, work)
        except CoserveError:
            work.close()
            raise
        if waits is None:
            work.close()
        else:
            self._futures.start(id, waits)
        return schemas.TinkerFuture(id, run.model)

    # ---- samples

    @_post("create_sampling_session", "Choose what to sample from")
    async def tinker_create_sampling_session(self, body: schemas.CreateSamplingSession) -> schemas.SamplingSession:
        owner = self._runs.owner(body.session_id)
        id = f"{owner.id}:sample:{body.sampling_session_seq_id}"
        self._runs.samplers[id] = self._target(body.base_model, body.model_path)
        return schemas.SamplingSession(id)

    @_route("GET", "samplers/{id}", "Show what a sampling session samples from", (410, 422))
    async def tinker_get_sampler(self, id: str) -> schemas.Sampler:
        target = self._runs.sampler(id)
        return schemas.Sampler(id, target.base, None if target.path is None else str(target.path))

    @_post("asample", "Sample")
    async def tinker_sample(self, body: schemas.TinkerSample) -> schemas.TinkerFuture:
        if body.sampling_session_id is None:
            target = self._target(body.base_model, body.model_path)
        else:
            target = self._runs.sampler(body.sampling_session_id)
        number = secrets.token_hex(8) if body.sampling_session_id is None or body.seq_id is None else body.seq_id
        id = f"{body.sampling_session_id or 'sample'}:{number}"
        if id not in self._futures:
            native = request_of(body, None if target.path is None else target.path.adapter)
            self._futures.start(id, sample(body, native, target.snapshot, self._service.generation))
        ids = [f"{id}:{index}" for index in range(body.num_samples)]
        return schemas.TinkerFuture(id, sample_sequence_ids=ids)

    def _target(self, base: str | None, path: str | None) -> SamplerTarget:
        spec = self._service.engine.spec
        if base is not None:
            check_base(base, spec)
        if path is None and base is None:
            raise InvalidRequest("expected base_model or model_path, got none", field="base_model")
        return SamplerTarget(base or spec.name, None if path is None else parse_path(path, sampler=True))

    # ---- results

    @_post("retrieve_future", "Wait for a result; samples and forwards are protobuf", response=RESULTS)
    async def tinker_retrieve_future(self, body: schemas.RetrieveFuture) -> web.Response:
        try:
            result = await self._futures.retrieve(body.request_id)
        except CoserveError as error:
            if body.request_id not in self._futures:
                raise
            return json_response(tinker_error(error))
        if result is None:
            if (waits := self._runs.waits(body.request_id)) is not None:
                return json_response(schemas.TryAgain(body.request_id, "paused_capacity", waits))
            return json_response(schemas.TryAgain(body.request_id, "active"))
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=PROTOBUF)
        return json_response(result)

    @_post("cancel_future", "Cancel a sample")
    async def tinker_cancel_future(self, body: schemas.RetrieveFuture) -> schemas.Accepted:
        if ":train:" not in body.request_id:  # a model's requests run to their end, as half of one would break it
            self._futures.cancel(body.request_id)
        return schemas.Accepted()

    # ---- saved states

    @_post("weights_info", "Show a saved state")
    async def tinker_weights_info(self, body: schemas.WeightsPath) -> schemas.WeightsInfo:
        path = parse_path(body.tinker_path, sampler=False)
        state = await asyncio.to_thread(read_state, self._service.folder, *path.state)
        return schemas.WeightsInfo(state.base, state.lora.r)

    @_route("GET", "training_runs/{id}/checkpoints", "List a model's saved states and sampler weights", (410, 422))
    async def tinker_list_checkpoints(self, id: str) -> schemas.TinkerCheckpoints:
        states = await asyncio.to_thread(saved_states, self._service.folder, run_of(id))
        saved = [(SavedPath(id, False, name), state.saved_at) for name, state in states]
        start = SavedPath(id, True, "").adapter
        adapters = await self._service.adapters.list(start, sys.maxsize, AdapterFilter(search=start))
        own = [each for each in adapters.data if each.id.startswith(start)]
        saved += [(SavedPath(id, True, each.id.removeprefix(start)), each.created_at) for each in own]
        return schemas.TinkerCheckpoints([_checkpoint(*one) for one in sorted(saved, key=lambda one: one[1])])

    @_route(
        "DELETE",
        "training_runs/{id}",
        "Delete a saved state or sampler weights, `MODEL/checkpoints/[sampler_]weights/NAME`",
        (409, 422, 507),
        slashes=True,
    )
    async def tinker_delete_checkpoint(self, id: str) -> schemas.Accepted:
        model, _, checkpoint = id.partition("/checkpoints/")
        path = parse_path(f"{SCHEME}{model}/{checkpoint}", sampler=checkpoint.startswith("sampler_"))
        if path.sampler:
            await self._service.adapters.delete(path.adapter)
            return schemas.Accepted()
        await asyncio.to_thread(read_state, self._service.folder, *path.state)
        await asyncio.to_thread(remove_dir, self._service.folder.session_state(*path.state))
        return schemas.Accepted()


def _checkpoint(path: SavedPath, saved_at: float) -> schemas.TinkerCheckpoint:
    return schemas.TinkerCheckpoint(
        str(path).removeprefix(f"{SCHEME}{path.model}/"),
        "sampler" if path.sampler else "training",
        datetime.fromtimestamp(saved_at, UTC).isoformat(),
        str(path),
    )


async def refused(error: CoserveError) -> Result:
    raise error
