"""The handlers of `/v1/fine_tuning/jobs`: the jobs of `POST /finetune`, as OpenAI's API shows them."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec import UNSET

from coserve.api.http.route import PAGE
from coserve.api.jobs.sources import UploadedRows
from coserve.api.openai.errors import openai_route
from coserve.api.openai.finetuning import schemas
from coserve.api.openai.finetuning.requests import default_rate, job_request
from coserve.api.openai.finetuning.results import result_file
from coserve.api.openai.lists import list_query
from coserve.api.openai.names import ORGANIZATION, model_name
from coserve.api.service import Service
from coserve.core.errors import AdapterNotFound, CorpusError, InvalidRequest, NotFound
from coserve.core.schemas.jobs import EventLevel, JobEvent
from coserve.core.training.jobs import JobState
from coserve.core.training.settings import DpoLoss
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import BaseSpec
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
            return self._service.files.content(id, "fine-tune", field)
        except NotFound as error:
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


_LEVELS: dict[EventLevel, schemas.Level] = {"info": "info", "warning": "warn", "error": "error"}


def job_object(record: JobRecord, base: BaseSpec) -> schemas.FineTuningJob:
    """Return a job. `base`: the daemon's base, shown as the model of a job that trains a new adapter."""
    spec, origin = record.spec, record.origin or JobOrigin(training_file="")
    method, hyperparameters = _method(record, base)
    ended, eta, error = record.state.terminal, record.eta, record.error
    return schemas.FineTuningJob(
        id=spec.id,
        created_at=int(record.created_at),
        finished_at=None if record.finished_at is None else int(record.finished_at),
        estimated_finish=int(time.time() + eta) if eta is not None and record.state is JobState.RUNNING else None,
        model=base.name if spec.init_from is None else model_name(spec.init_from, base.name),
        fine_tuned_model=None if record.result is None else model_name(record.result, base.name),
        organization_id=ORGANIZATION,
        status=record.state.value,
        trained_tokens=record.trained_tokens if ended else None,
        training_file=origin.training_file,
        validation_file=origin.validation_file,
        result_files=[] if record.result is None else [result_file(spec.id)],
        seed=spec.training.seed,
        method=method,
        hyperparameters=hyperparameters,
        metadata=record.metadata,
        error=None if error is None else schemas.JobError(code=error.code, message=error.message, param=error.field),
    )


def _method(record: JobRecord, base: BaseSpec) -> tuple[schemas.Method | None, schemas.Hyperparameters]:
    """Return the method with the values that the job has, None for losses that OpenAI lacks, and its
    hyperparameters."""
    spec, training = record.spec, record.spec.training
    rate = training.learning_rate / default_rate(training.loss, base)
    asked = None if record.origin is None else record.origin.batch_rows
    common = schemas.Hyperparameters(
        batch_size=asked or max(1, round(training.batch_tokens * spec.rows / max(1, spec.tokens))),
        learning_rate_multiplier=float(f"{rate:.6g}"),
        n_epochs=None if training.epochs is None else max(1, round(training.epochs)),
    )
    if training.loss is None:
        return schemas.Method(type="supervised", supervised=schemas.Supervised(hyperparameters=common)), common
    if not isinstance(training.loss, DpoLoss):
        return None, common
    own = schemas.DpoHyperparameters(**msgspec.structs.asdict(common), beta=training.loss.beta)
    return schemas.Method(type="dpo", dpo=schemas.Dpo(hyperparameters=own)), common


def event_object(event: JobEvent) -> schemas.FineTuningEvent:
    return schemas.FineTuningEvent(
        id=f"{event.job}-{event.seq}",
        created_at=int(event.created_at),
        level=_LEVELS[event.level],
        message=event.message,
        type="message" if event.metrics is None else "metrics",
        data=event.metrics,
    )


def checkpoint_objects(record: JobRecord, step: int | None, base: BaseSpec) -> list[schemas.Checkpoint]:
    """Return the weights that the job published. `step`: their optimizer step."""
    if record.result is None or record.finished_at is None or step is None:
        return []
    metrics = record.metrics
    checkpoint = schemas.Checkpoint(
        id=f"{record.spec.id}-{step}",
        created_at=int(record.finished_at),
        fine_tuned_model_checkpoint=model_name(record.result, base.name),
        fine_tuning_job_id=record.spec.id,
        step_number=step,
        metrics=schemas.CheckpointMetrics(step=step) if metrics is None or metrics.step != step else _metrics(metrics),
    )
    return [checkpoint]


def _metrics(metrics: StepMetrics) -> schemas.CheckpointMetrics:
    return schemas.CheckpointMetrics(
        step=metrics.step,
        train_loss=metrics.loss,
        train_mean_token_accuracy=UNSET if metrics.token_accuracy is None else metrics.token_accuracy,
        full_valid_loss=UNSET if metrics.valid_loss is None else metrics.valid_loss,
        full_valid_mean_token_accuracy=UNSET if metrics.valid_token_accuracy is None else metrics.valid_token_accuracy,
    )
