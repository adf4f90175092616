"""The table of routes: the router, the gate and `/openapi.json` are made from it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from coserve.api.answers import NATIVE, Refusal
from coserve.api.native import NativeApi
from coserve.api.security import Handler
from coserve.api.tgi import TGI
from coserve.api.tgi_schemas import TgiRequest, TgiResponse, TgiStreamEvent
from coserve.schemas import (
    Adapter,
    AdapterList,
    DeletedAdapter,
    FinetuneRequest,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    Health,
    ImportRequest,
    Job,
    JobEvent,
    JobList,
    RollbackRequest,
)

PAGE = ("after", "limit")
BODY_ERRORS = (408, 413, 415)
BUSY_ERRORS = (429, 503)

Schema = type[msgspec.Struct] | tuple[type[msgspec.Struct], ...]
"""One type, or one of several."""


@dataclass(frozen=True)
class Route:
    """One method of one path. `errors`: statuses besides 400, 401 and 403, which every route may answer with."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Schema | None = None
    upload: bool = False
    """The body may be multipart/form-data too, with files."""
    answer: Schema | None = None
    listed: bool = False
    """The answer is a list of these."""
    status: int = 200
    events: Schema | None = None
    """What the data of server-sent events is."""
    media: str | None = None
    """Content type of an answer that is not JSON."""
    query: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    refusals: tuple[Refusal, ...] = (NATIVE,)
    """How it says no; the gate does as the first."""
    slashes: bool = False
    """The last part of the path takes slashes too."""
    public: bool = False
    """Open without the key. Nothing else is."""

    @property
    def pattern(self) -> str:
        """The path for the router."""
        return self.path.replace("{id}", "{id:.+}") if self.slashes else self.path

    @property
    def name(self) -> str:
        """By which the router, the gate and the metrics know it."""
        return self.handler.__name__


def native_routes(api: NativeApi) -> tuple[Route, ...]:
    """Every route of coserve's own API but `/openapi.json`, which is made from them."""
    body, busy = BODY_ERRORS, BUSY_ERRORS
    return (
        Route(
            "POST",
            "/generate",
            api.generate,
            "Generate text with the base or one adapter",
            body=(GenerateRequest, TgiRequest),
            answer=(GenerateResponse, TgiResponse),
            events=(GenerateChunk, TgiStreamEvent),
            errors=(404, 422, *body, *busy),
            refusals=(NATIVE, TGI),
        ),
        Route(
            "POST",
            "/finetune",
            api.finetune,
            "Start a fine-tuning job",
            body=FinetuneRequest,
            upload=True,
            answer=Job,
            status=202,
            errors=(404, 422, *body, *busy, 507),
        ),
        Route("GET", "/finetune", api.list_jobs, "List jobs, newest first", answer=JobList, query=PAGE, errors=(404,)),
        Route("GET", "/finetune/{id}", api.get_job, "Show a job", answer=Job, errors=(404,)),
        Route(
            "GET",
            "/finetune/{id}/events",
            api.job_events,
            "Follow a job: its story so far, then live, until its end",
            events=JobEvent,
            query=("after",),
            errors=(404, 429),
        ),
        Route("POST", "/finetune/{id}/pause", api.pause_job, "Pause a job", answer=Job, errors=(404, 409, 507)),
        Route("POST", "/finetune/{id}/resume", api.resume_job, "Resume a job", answer=Job, errors=(404, 409, 507)),
        Route("POST", "/finetune/{id}/cancel", api.cancel_job, "Cancel a job", answer=Job, errors=(404, 409, 507)),
        Route("GET", "/adapters", api.list_adapters, "List adapters by name", answer=AdapterList, query=PAGE),
        Route(
            "POST",
            "/adapters",
            api.import_adapter,
            "Import PEFT files",
            body=ImportRequest,
            upload=True,
            answer=Adapter,
            status=201,
            errors=(422, *body, *busy, 507),
        ),
        Route("GET", "/adapters/{id}", api.get_adapter, "Show an adapter", answer=Adapter, errors=(404,)),
        Route(
            "GET",
            "/adapters/{id}/download",
            api.download_adapter,
            "Download PEFT files",
            media="application/x-tar",
            errors=(404,),
        ),
        Route(
            "DELETE",
            "/adapters/{id}",
            api.delete_adapter,
            "Delete an adapter: one version of it (`name@version`) or all (`name`)",
            answer=DeletedAdapter,
            errors=(404, 409, 503, 507),
        ),
        Route(
            "POST",
            "/adapters/{id}/rollback",
            api.roll_back_adapter,
            "Have an adapter's name mean an older version",
            body=RollbackRequest,
            answer=Adapter,
            errors=(404, *body, 503, 507),
        ),
        Route("GET", "/health", api.health, "What works", answer=Health, errors=(503,), public=True),
        Route("GET", "/metrics", api.metrics, "Prometheus metrics", media="text/plain"),
    )
