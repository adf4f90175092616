"""The handlers of coserve's own API: decode the request, call the service, encode the response."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from coserve import __version__
from coserve.api.adapters.filters import FILTERS, adapter_filter
from coserve.api.generation.full_response import collect_native
from coserve.api.http.bodies import BodyReader
from coserve.api.http.body_quota import check_copy
from coserve.api.http.parsing import decode_dialect, decode_json, decode_last, page, ref_from_path
from coserve.api.http.responses import NATIVE_ERRORS, error_response, json_response
from coserve.api.http.route import PAGE, Route
from coserve.api.http.sse import event_response
from coserve.api.http.uploads import VALIDATION, UploadReader, is_upload
from coserve.api.jobs.preparation import submission_events
from coserve.api.jobs.sources import UploadedRows
from coserve.api.service import Service
from coserve.api.tgi.handlers import TGI_ERRORS, TgiApi
from coserve.api.tgi.schemas import TgiRequest, TgiResponse, TgiStreamEvent
from coserve.core.errors import InvalidRequest, RequestError
from coserve.core.health import Health, Warming
from coserve.core.names import ADAPTER_FILES
from coserve.core.schemas.adapters import (
    Adapter,
    AdapterList,
    AdapterUpdate,
    ConvertedAdapter,
    ConvertRequest,
    DeletedAdapter,
    ImportRequest,
    RollbackRequest,
)
from coserve.core.schemas.generation import GenerateChunk, GenerateRequest, GenerateResponse
from coserve.core.schemas.jobs import DeletedJob, FinetuneRequest, Job, JobEvent, JobList, SubmissionEvent
from coserve.core.schemas.service import STREAM_END, Pointers

HEARTBEAT = 15.0
MAX_RETRY_AFTER = 10
"""Most seconds in `Retry-After`; an estimate of the time left may be far too long."""
DOCS = {
    "README.md": "how to start",
    "docs/guide/install.md": "installation, with and without CUDA",
    "docs/guide/concepts.md": "base, adapters, policy, slices: what runs when",
    "docs/guide/first-adapter.md": "from a CSV file to a served adapter",
    "docs/guide/serve.md": "requests, adapters, policies",
    "docs/guide/fine-tune.md": "settings and metrics of jobs, samples, DPO",
    "docs/guide/data.md": "rows to fine-tune on",
    "docs/guide/documents.md": "documents that become adapters",
    "docs/guide/page.md": "the web page at /",
    "docs/guide/tinker.md": "training sessions, by the Tinker SDK",
    "docs/guide/operate.md": "start, readiness, probes, stopping",
    "docs/guide/latency-targets.md": "targets of requests, and what they cost fine-tuning",
    "docs/guide/several-gpus.md": "the base on several GPUs",
    "docs/guide/bdlora.md": "LoRA in blocks, for tensor parallelism",
    "docs/guide/memory.md": "which GPU a base needs, room for adapters, and how jobs are admitted by memory",
    "docs/guide/bench.md": "coserve bench",
    "docs/guide/families.md": "families of models, and what works with each",
    "docs/guide/from-vllm-and-peft.md": "options and fields of vLLM and PEFT, and coserve's",
    "docs/guide/from-openai.md": "OpenAI's files, fine-tuning, responses and batches",
    "docs/guide/clients.md": "clients that are tested",
    "docs/guide/from-llama-factory.md": "LLaMA-Factory's settings, and coserve's",
    "docs/reference/http.md": "every route and field",
    "docs/reference/sdk.md": "the Python client",
    "docs/reference/cli.md": "the command line",
    "docs/reference/settings.md": "settings of the daemon",
    "docs/reference/troubleshooting.md": "errors by code, and what to do",
    "docs/reference/metrics.md": "what /metrics counts",
    "docs/design/README.md": "how the code is built",
}


class NativeApi:
    def __init__(self, service: Service, bodies: BodyReader, uploads: UploadReader, tgi: TgiApi) -> None:
        self._service, self._bodies, self._uploads, self._tgi = service, bodies, uploads, tgi

    # ---- generation

    @Route(
        "POST",
        "/generate",
        "Generate text with the base or one adapter",
        body=(GenerateRequest, TgiRequest),
        response=(GenerateResponse, TgiResponse),
        events=(GenerateChunk, TgiStreamEvent),
        stream_end=True,
        errors=(404, 422),
        error_formats=(NATIVE_ERRORS, TGI_ERRORS),
    )
    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._bodies.read(request, decode_generate)
        if isinstance(body, RequestError):
            return error_response(body, TGI_ERRORS)
        if isinstance(body, TgiRequest):
            return await self._tgi.respond(request, body)
        body = self._service.sampling_defaults.fill(body)
        if not body.stream:
            return json_response(await collect_native(body, self._service.generation.stream(body)))
        chunks = self._service.generation.stream(body)
        return await event_response(request, chunks, NATIVE_ERRORS.make, error_event="error", last=STREAM_END)

    # ---- jobs

    @Route(
        "POST",
        "/finetune",
        "Start a fine-tuning job",
        body=FinetuneRequest,
        upload=("file", VALIDATION),
        response=Job,
        events=SubmissionEvent,
        status=202,
        headers=("Idempotency-Key",),
        errors=(404, 409, 422, 507),
    )
    async def finetune(self, request: web.Request) -> web.StreamResponse:
        key = request.headers.get("Idempotency-Key")
        if not is_upload(request):
            async with self._service.stopping.read(self._bodies.corpus(request, self._staging)) as (settings, file):
                return await self._submit(request, settings, UploadedRows(file), key)
        async with self._service.stopping.read(self._uploads.read(request, FinetuneRequest, self._staging)) as (
            settings,
            folder,
        ):
            validation = folder / VALIDATION
            held = validation if await asyncio.to_thread(validation.exists) else None
            return await self._submit(request, settings, UploadedRows(folder / "file", held), key)

    async def _submit(
        self, request: web.Request, settings: FinetuneRequest, rows: UploadedRows, key: str | None
    ) -> web.StreamResponse:
        jobs = self._service.jobs
        if "text/event-stream" not in request.headers.get("Accept", ""):
            return json_response(await jobs.submit(settings, rows, key), status=202)
        events = submission_events(partial(jobs.submit, settings, rows, key), HEARTBEAT)
        return await event_response(request, events, NATIVE_ERRORS.make, status=202, error_event="error")

    @Route("GET", "/finetune", "List jobs, newest first", query=PAGE, errors=(404,))
    async def list_jobs(self, request: web.Request) -> JobList:
        return await self._service.jobs.list(*page(request.query))

    @Route("GET", "/finetune/{id}", "Show a job")
    async def get_job(self, id: str) -> Job:
        return await self._service.jobs.views.get(id)

    @Route(
        "GET",
        "/finetune/{id}/events",
        "Follow a job: its past events, then live ones, until its end",
        events=JobEvent,
        query=("after",),
        headers=("Last-Event-ID",),
    )
    async def job_events(self, request: web.Request, id: str) -> web.StreamResponse:
        events = self._service.jobs.views.events(id, _last_event(request), HEARTBEAT)
        make, id_of = NATIVE_ERRORS.make, lambda event: event.seq
        return await event_response(request, events, make, error_event="error", id_of=id_of)

    @Route("POST", "/finetune/{id}/pause", "Pause a job", errors=(409, 507))
    async def pause_job(self, id: str) -> Job:
        return await self._service.jobs.pause(id)

    @Route("POST", "/finetune/{id}/resume", "Resume a job", errors=(409, 507))
    async def resume_job(self, id: str) -> Job:
        return await self._service.jobs.resume(id)

    @Route("POST", "/finetune/{id}/cancel", "Cancel a job", errors=(409, 507))
    async def cancel_job(self, id: str) -> Job:
        return await self._service.jobs.cancel(id)

    @Route(
        "DELETE", "/finetune/{id}", "Delete a job that has ended, and its events; its adapter stays", errors=(409, 507)
    )
    async def delete_job(self, id: str) -> DeletedJob:
        return await self._service.jobs.delete(id)

    # ---- adapters

    @Route("GET", "/adapters", "List adapters by name", query=(*PAGE, *FILTERS))
    async def list_adapters(self, request: web.Request) -> AdapterList:
        after, limit = page(request.query, FILTERS)
        return await self._service.adapters.list(after, limit, adapter_filter(request.query))

    @Route(
        "POST",
        "/adapters",
        "Import PEFT files",
        body=ImportRequest,
        upload=("file",),
        status=201,
        errors=(409, 422, 507),
    )
    async def import_adapter(self, request: web.Request) -> Adapter:
        check = partial(check_copy, request)
        if not is_upload(request):
            body = await self._bodies.read(request, ImportRequest)
            return await self._service.adapters.import_files(body, None, check)
        upload = self._uploads.read(request, ImportRequest, self._staging, ADAPTER_FILES)
        async with self._service.stopping.read(upload) as (settings, folder):
            return await self._service.adapters.import_files(settings, folder, check)

    @Route("GET", "/adapters/{id}", "Show an adapter")
    async def get_adapter(self, id: str) -> Adapter:
        return await self._service.adapters.get(*ref_from_path(id))

    @Route("GET", "/adapters/{id}/download", "Download PEFT files", media="application/x-tar", errors=(422,))
    async def download_adapter(self, request: web.Request, id: str) -> web.StreamResponse:
        async with self._service.adapters.archive(*ref_from_path(id)) as archive:
            response = web.StreamResponse(
                headers={
                    "Content-Type": "application/x-tar",
                    "Content-Length": str(archive.size),
                    "Content-Disposition": f'attachment; filename="{archive.name}.tar"',
                }
            )
            await response.prepare(request)
            async for chunk in archive.chunks():
                await response.write(chunk)
            await response.write_eof()
            return response

    @Route(
        "PATCH",
        "/adapters/{id}",
        "Set an adapter's tags, its time to live, or whether a version stays in host memory",
        errors=(422, 507),
    )
    async def update_adapter(self, id: str, body: AdapterUpdate) -> Adapter:
        return await self._service.adapters.update(*ref_from_path(id), body)

    @Route(
        "DELETE",
        "/adapters/{id}",
        "Delete an adapter: one version of it (`name@version`) or all (`name`)",
        errors=(409, 507),
    )
    async def delete_adapter(self, id: str) -> DeletedAdapter:
        return await self._service.adapters.delete(*ref_from_path(id))

    @Route(
        "POST",
        "/adapters/{id}/rollback",
        "Make an older version of an adapter the current one",
        body=RollbackRequest,
        errors=(507,),
    )
    async def roll_back_adapter(self, request: web.Request, id: str) -> Adapter:
        name, version = ref_from_path(id)
        if version is not None:
            raise InvalidRequest("expected a name without a version: the body names it", field="id")
        body = await self._bodies.read(request, RollbackRequest)
        return await self._service.adapters.roll_back(name, body.version)

    @Route(
        "POST",
        "/adapters/{id}/prefetch",
        "Read an adapter into memory before a request needs it; the answer does not wait for it",
        status=202,
        errors=(422,),
    )
    async def prefetch_adapter(self, id: str) -> Adapter:
        return await self._service.adapters.prefetch(*ref_from_path(id))

    @Route(
        "POST",
        "/adapters/{id}/convert",
        "Make a BD-LoRA adapter of a LoRA one, or the reverse",
        status=201,
        errors=(409, 422, 507),
    )
    async def convert_adapter(self, id: str, body: ConvertRequest) -> ConvertedAdapter:
        return await self._service.conversions.convert(*ref_from_path(id), body)

    # ---- the daemon

    async def pointers(self, request: web.Request) -> web.StreamResponse:
        return json_response(Pointers(version=__version__, docs=DOCS))

    @Route("GET", "/health", "What works", response=Health, starting=Health, public=True)
    async def health(self, request: web.Request) -> web.StreamResponse:
        health = self._service.health()
        return _health_response(health, ready=health.status != "starting")

    @Route("GET", "/health/ready", "Readiness, for load balancers", response=Health, starting=Health, public=True)
    async def ready(self, request: web.Request) -> web.StreamResponse:
        return _health_response(self._service.health(), ready=self._service.ready)

    @Route("GET", "/ping", "The same as /health: SageMaker's check", response=Health, starting=Health, public=True)
    async def ping(self, request: web.Request) -> web.StreamResponse:
        return await self.health(request)

    @Route("POST", "/ping", "The same as /health: SageMaker's check", response=Health, starting=Health, public=True)
    async def post_ping(self, request: web.Request) -> web.StreamResponse:
        return await self.health(request)

    @Route("GET", "/metrics", "Prometheus metrics", media="text/plain")
    async def metrics(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        service.metrics.jobs(await service.jobs.views.states())
        service.metrics.status(service.ready, service.engine.warmup)
        service.metrics.ranks(service.engine.rank_states)
        service.generation.report_adapters()
        page = service.metrics.page(restarts=service.engine.restarts)
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    @property
    def _staging(self) -> Path:
        return self._service.folder.staging


def _health_response(health: Health, *, ready: bool) -> web.Response:
    if ready:
        return json_response(health)
    response = json_response(health, status=503)
    response.headers["Retry-After"] = str(retry_after(health.warming))
    return response


def retry_after(warming: Warming | None) -> int:
    """Return the seconds after which to ask again whether the daemon is ready."""
    left = None if warming is None else warming.seconds_left
    return 2 if left is None else min(MAX_RETRY_AFTER, max(1, math.ceil(left)))


class _Probe(msgspec.Struct):
    inputs: msgspec.Raw | UnsetType = UNSET


def decode_generate(content: bytes) -> GenerateRequest | TgiRequest | RequestError:
    """Decode a native request, or one of LoRAX and TGI, which has `inputs`. Errors in the latter are returned, not
    raised."""
    if b'"inputs"' in content and decode_last(content, _Probe).inputs is not UNSET:
        try:
            return decode_dialect(content, TgiRequest)
        except RequestError as error:
            return error
    return decode_json(content, GenerateRequest)


def _last_event(request: web.Request) -> int:
    """Return the id of the last event that the client has seen, from header `Last-Event-ID` or `?after=`."""
    for field, text in (("Last-Event-ID", request.headers.get("Last-Event-ID")), ("after", request.query.get("after"))):
        if text:
            if not (text.isascii() and text.isdigit() and len(text) <= 15):
                raise InvalidRequest(f"expected a number, got {text[:80]!r}", field=field)
            return int(text)
    return 0
