"""Jobs, their events and checkpoints in OpenAI's format."""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET

from coserve.api.openai.finetuning import schemas
from coserve.api.openai.finetuning.requests import default_rate
from coserve.api.openai.finetuning.results import result_file
from coserve.api.openai.names import ORGANIZATION, model_name
from coserve.core.schemas import EventLevel, JobEvent
from coserve.core.training.jobs import JobState
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import BaseSpec
from coserve.state.registry.records import JobOrigin, JobRecord

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


def _method(record: JobRecord, base: BaseSpec) -> tuple[schemas.Method, schemas.Hyperparameters]:
    """Return the method with the values that the job has, and its hyperparameters."""
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
