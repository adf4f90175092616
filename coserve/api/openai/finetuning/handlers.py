"""The handlers of `/v1/fine_tuning/jobs`: the jobs of `POST /finetune`, as OpenAI's API shows them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from aiohttp import web

from coserve.api.http.route import PAGE
from coserve.api.jobs.sources import UploadedRows
from coserve.api.openai.errors import openai_route
from coserve.api.openai.finetuning import schemas
from coserve.api.openai.finetuning.requests import job_request
from coserve.api.openai.finetuning.views import checkpoint_objects, event_object, job_object
from coserve.api.openai.lists import list_query
from coserve.api.service import Service
from coserve.core.errors import AdapterNotFound, CorpusError, InvalidRequest, NotFound
from coserve.state.registry.records import JobOrigin, JobRecord

JOBS = "/v1/fine_tuning/jobs"


class FineTuningApi:
    def __init__(self, service: Service) -> None:
        self._service = service

    @openai_route(
        "POST",
        JOBS,
        "Start a fine-tuning job from an uploaded file, as OpenAI does",
        headers=("Idempotency-Key",),
        errors=(404, 409, 422, 507),
    )
    async def create_tuning(self, request: web.Request, body: schemas.CreateJob) -> schemas.FineTuningJob:
        key = request.headers.get("Idempotency-Key")
        native = job_request(body, self._service.engine.spec, key)
        training = self._file(body.training_file, "training_file")
        validation = None if body.validation_file is None else self._file(body.validation_file, "validation_file")
        batch_rows = native.training.batch_rows
        origin = JobOrigin(
            training_file=body.training_file, validation_file=body.validation_file, batch_rows=batch_rows
        )
        try:
            job = await self._service.jobs.submit(native, UploadedRows(training, validation), key, origin=origin)
        except (CorpusError, InvalidRequest) as error:
            if error.field == "validation":
                message = error.message.replace("validation", "validation_file", 1)
                raise type(error)(message, field="validation_file") from None
            if isinstance(error, CorpusError):
                raise type(error)(error.message, field="training_file") from None
            raise
        return await self._show(job.id)

    def _file(self, id: str, field: str) -> Path:
        try:
            return self._service.files.content(id, "fine-tune")
        except (InvalidRequest, NotFound) as error:
            raise InvalidRequest(error.message, field=field) from None

    async def _show(self, id: str) -> schemas.FineTuningJob:
        return job_object(await self._service.jobs.views.record(id), self._service.engine.spec)

    @openai_route("GET", JOBS, "List jobs, newest first, in OpenAI's format", query=(*PAGE, "metadata"), errors=(404,))
    async def list_tunings(self, request: web.Request) -> schemas.FineTuningJobList:
        wanted = {key[9:-1]: value for key, value in request.query.items() if _of_metadata(key)}
        after, limit = list_query(request.query, ("metadata", *filter(_of_metadata, request.query)))
        if (none := request.query.get("metadata", "null")) != "null":
            raise InvalidRequest(f"expected null, or metadata[KEY]=VALUE, got {none[:80]!r}", field="metadata")

        def keep(record: JobRecord) -> bool:
            return not record.metadata if "metadata" in request.query else wanted.items() <= record.metadata.items()

        records = await self._service.jobs.views.records(after, limit + 1, keep)
        data = [job_object(record, self._service.engine.spec) for record in records[:limit]]
        return schemas.FineTuningJobList(data=data, has_more=len(records) > limit)

    @openai_route("GET", f"{JOBS}/{{id}}", "Show a job in OpenAI's format")
    async def get_tuning(self, id: str) -> schemas.FineTuningJob:
        return await self._show(id)

    @openai_route("POST", f"{JOBS}/{{id}}/cancel", "Cancel a job", errors=(409, 507))
    async def cancel_tuning(self, id: str) -> schemas.FineTuningJob:
        return await self._show((await self._service.jobs.cancel(id)).id)

    @openai_route("POST", f"{JOBS}/{{id}}/pause", "Pause a job", errors=(409, 507))
    async def pause_tuning(self, id: str) -> schemas.FineTuningJob:
        return await self._show((await self._service.jobs.pause(id)).id)

    @openai_route("POST", f"{JOBS}/{{id}}/resume", "Resume a job", errors=(409, 507))
    async def resume_tuning(self, id: str) -> schemas.FineTuningJob:
        return await self._show((await self._service.jobs.resume(id)).id)

    @openai_route("GET", f"{JOBS}/{{id}}/events", "List a job's events, newest first", query=PAGE)
    async def tuning_events(self, request: web.Request, id: str) -> schemas.FineTuningEventList:
        after, limit = list_query(request.query)
        before = None if after is None else _event_number(after, id)
        events = await self._service.jobs.views.latest_events(id, before, limit + 1)
        return schemas.FineTuningEventList(
            data=[event_object(event) for event in events[:limit]], has_more=len(events) > limit
        )

    @openai_route("GET", f"{JOBS}/{{id}}/checkpoints", "List the weights of a job that requests can use", query=PAGE)
    async def tuning_checkpoints(self, request: web.Request, id: str) -> schemas.CheckpointList:
        after, limit = list_query(request.query)
        views = self._service.jobs.views
        record = await views.record(id)
        data = list[schemas.Checkpoint]()
        if after is None and record.result is not None:
            with suppress(AdapterNotFound):  # deleted since
                await self._service.adapters.get(record.result.id, record.result.version)
                step = (await views.show(record)).published_step
                data = checkpoint_objects(record, step, self._service.engine.spec)[:limit]
        return schemas.CheckpointList.of(data)


def _of_metadata(parameter: str) -> bool:
    """Whether a query parameter is `metadata[KEY]`."""
    return parameter.startswith("metadata[") and parameter.endswith("]")


def _event_number(after: str, job: str) -> int:
    """Return the number of the event with id `after`."""
    number = after.removeprefix(f"{job}-")
    if number == after or not (number.isascii() and number.isdigit() and len(number) <= 15):
        raise InvalidRequest(f"expected an event of this job, got {after[:80]!r}", field="after")
    return int(number)
