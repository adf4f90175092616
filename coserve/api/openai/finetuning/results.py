"""The result file of a job: the metrics of its steps as CSV, in OpenAI's columns, made when it is asked for."""

from __future__ import annotations

import asyncio

import msgspec

from coserve.api.jobs.views import JobViews
from coserve.core.training.step_metrics import StepMetrics
from coserve.state.files import FileRecord
from coserve.state.registry.records import JobRecord

PURPOSE = "fine-tune-results"
_PREFIX = "file-job-"
_HEADER = "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
_PAGE = 1000


def result_file(job: str) -> str:
    """Return the id of a job's result file."""
    return f"file-{job}"


def is_result(file: str) -> bool:
    return file.startswith(_PREFIX)


async def result_records(views: JobViews) -> list[FileRecord]:
    """Return the result files of all jobs that published an adapter; `bytes` of 0 stands for a size to be counted."""
    jobs = await views.records(None, -1, lambda job: job.result is not None)
    return [_record(job) for job in jobs]


def _record(job: JobRecord) -> FileRecord:
    return FileRecord(
        id=result_file(job.spec.id),
        created_at=job.finished_at or job.created_at,
        filename="step_metrics.csv",
        purpose=PURPOSE,
        bytes=0,
    )


async def read_result(views: JobViews, file: str) -> tuple[FileRecord, bytes]:
    """Return a result file and its content. Raises `JobNotFound`."""
    record = await views.record(file.removeprefix("file-"))
    steps, before = dict[int, StepMetrics](), None
    while events := await views.latest_events(record.spec.id, before, _PAGE):
        before = events[-1].seq
        for event in events:
            if event.metrics is not None:
                steps.setdefault(event.metrics.step, event.metrics)  # the latest, if a crash had it done again
    content = await asyncio.to_thread(_content, steps)
    return msgspec.structs.replace(_record(record), bytes=len(content)), content


def _content(steps: dict[int, StepMetrics]) -> bytes:
    return "".join(f"{line}\n" for line in (_HEADER, *(_line(steps[step]) for step in sorted(steps)))).encode()


def _line(metrics: StepMetrics) -> str:
    values = (metrics.loss, metrics.token_accuracy, metrics.valid_loss, metrics.valid_token_accuracy)
    return ",".join([str(metrics.step), *("" if value is None else f"{value:.6g}" for value in values)])
