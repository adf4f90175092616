"""The routes of coserve's own API."""

from __future__ import annotations

from coserve.api.adapters.filters import FILTERS
from coserve.api.http.responses import NATIVE_ERRORS
from coserve.api.http.route import BODY_ERRORS, BUSY, PAGE, Route
from coserve.api.http.uploads import VALIDATION
from coserve.api.native.handlers import NativeApi
from coserve.api.tgi.errors import TGI_ERRORS
from coserve.api.tgi.schemas import TgiRequest, TgiResponse, TgiStreamEvent
from coserve.core.health import Health
from coserve.core.schemas import (
    Adapter,
    AdapterList,
    AdapterUpdate,
    ConvertedAdapter,
    ConvertRequest,
    DeletedAdapter,
    DeletedJob,
    FinetuneRequest,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    ImportRequest,
    Job,
    JobEvent,
    JobList,
    RollbackRequest,
    SubmissionEvent,
)


def native_routes(api: NativeApi) -> tuple[Route, ...]:
    """Every route of coserve's own API except `/openapi.json`, which is generated from them."""
    return (*_generation_routes(api), *_job_routes(api), *_adapter_routes(api), *_health_routes(api))


def _generation_routes(api: NativeApi) -> tuple[Route, ...]:
    return (
        Route(
            "POST",
            "/generate",
            api.generate,
            "Generate text with the base or one adapter",
            body=(GenerateRequest, TgiRequest),
            response=(GenerateResponse, TgiResponse),
            events=(GenerateChunk, TgiStreamEvent),
            stream_end=True,
            errors=(404, 422, *BODY_ERRORS, BUSY),
            error_formats=(NATIVE_ERRORS, TGI_ERRORS),
        ),
    )


def _job_routes(api: NativeApi) -> tuple[Route, ...]:
    return (
        Route(
            "POST",
            "/finetune",
            api.finetune,
            "Start a fine-tuning job",
            body=FinetuneRequest,
            upload=("file", VALIDATION),
            response=Job,
            events=SubmissionEvent,
            status=202,
            headers=("Idempotency-Key",),
            errors=(404, 409, 422, *BODY_ERRORS, BUSY, 507),
        ),
        Route(
            "GET", "/finetune", api.list_jobs, "List jobs, newest first", response=JobList, query=PAGE, errors=(404,)
        ),
        Route("GET", "/finetune/{id}", api.get_job, "Show a job", response=Job, errors=(404,)),
        Route(
            "GET",
            "/finetune/{id}/events",
            api.job_events,
            "Follow a job: its past events, then live ones, until its end",
            events=JobEvent,
            query=("after",),
            headers=("Last-Event-ID",),
            errors=(404, BUSY),
        ),
        Route("POST", "/finetune/{id}/pause", api.pause_job, "Pause a job", response=Job, errors=(404, 409, 507)),
        Route("POST", "/finetune/{id}/resume", api.resume_job, "Resume a job", response=Job, errors=(404, 409, 507)),
        Route("POST", "/finetune/{id}/cancel", api.cancel_job, "Cancel a job", response=Job, errors=(404, 409, 507)),
        Route(
            "DELETE",
            "/finetune/{id}",
            api.delete_job,
            "Delete a job that has ended, and its events; its adapter stays",
            response=DeletedJob,
            errors=(404, 409, 507),
        ),
    )


def _adapter_routes(api: NativeApi) -> tuple[Route, ...]:
    return (
        Route(
            "GET",
            "/adapters",
            api.list_adapters,
            "List adapters by name",
            response=AdapterList,
            query=(*PAGE, *FILTERS),
        ),
        Route(
            "POST",
            "/adapters",
            api.import_adapter,
            "Import PEFT files",
            body=ImportRequest,
            upload=("file",),
            response=Adapter,
            status=201,
            errors=(409, 422, *BODY_ERRORS, BUSY, 507),
        ),
        Route("GET", "/adapters/{id}", api.get_adapter, "Show an adapter", response=Adapter, errors=(404,)),
        Route(
            "GET",
            "/adapters/{id}/download",
            api.download_adapter,
            "Download PEFT files",
            media="application/x-tar",
            errors=(404, 422),
        ),
        Route(
            "PATCH",
            "/adapters/{id}",
            api.update_adapter,
            "Set an adapter's tags, its time to live, or whether a version stays in host memory",
            body=AdapterUpdate,
            response=Adapter,
            errors=(404, 422, *BODY_ERRORS, 507),
        ),
        Route(
            "DELETE",
            "/adapters/{id}",
            api.delete_adapter,
            "Delete an adapter: one version of it (`name@version`) or all (`name`)",
            response=DeletedAdapter,
            errors=(404, 409, 507),
        ),
        Route(
            "POST",
            "/adapters/{id}/rollback",
            api.roll_back_adapter,
            "Make an older version of an adapter the current one",
            body=RollbackRequest,
            response=Adapter,
            errors=(404, *BODY_ERRORS, 507),
        ),
        Route(
            "POST",
            "/adapters/{id}/prefetch",
            api.prefetch_adapter,
            "Read an adapter into memory before a request needs it; the answer does not wait for it",
            response=Adapter,
            status=202,
            errors=(404, 422),
        ),
        Route(
            "POST",
            "/adapters/{id}/convert",
            api.convert_adapter,
            "Make a BD-LoRA adapter of a LoRA one, or the reverse",
            body=ConvertRequest,
            response=ConvertedAdapter,
            status=201,
            errors=(404, 409, 422, *BODY_ERRORS, BUSY, 507),
        ),
    )


def _health_routes(api: NativeApi) -> tuple[Route, ...]:
    return (
        Route("GET", "/health", api.health, "What works", response=Health, starting=Health, public=True),
        Route(
            "GET",
            "/health/ready",
            api.ready,
            "Readiness, for load balancers",
            response=Health,
            starting=Health,
            public=True,
        ),
        Route("GET", "/metrics", api.metrics, "Prometheus metrics", media="text/plain"),
    )
