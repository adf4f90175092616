"""The routes of `/v1/fine_tuning/jobs`."""

from __future__ import annotations

from coserve.api.http.route import BODY_ERRORS, BUSY, PAGE, Route
from coserve.api.openai.errors import openai_route
from coserve.api.openai.finetuning.handlers import FineTuningApi
from coserve.api.openai.finetuning.schemas import (
    CheckpointList,
    CreateJob,
    FineTuningEventList,
    FineTuningJob,
    FineTuningJobList,
)

JOBS = "/v1/fine_tuning/jobs"


def finetuning_routes(api: FineTuningApi) -> tuple[Route, ...]:
    changes = (
        ("cancel", api.cancel_tuning, "Cancel"),
        ("pause", api.pause_tuning, "Pause"),
        ("resume", api.resume_tuning, "Resume"),
    )
    return (
        openai_route(
            "POST",
            JOBS,
            api.create_tuning,
            "Start a fine-tuning job from an uploaded file, as OpenAI does",
            body=CreateJob,
            response=FineTuningJob,
            headers=("Idempotency-Key",),
            errors=(404, 409, 422, *BODY_ERRORS, BUSY, 507),
        ),
        openai_route(
            "GET",
            JOBS,
            api.list_tunings,
            "List jobs, newest first, in OpenAI's format",
            response=FineTuningJobList,
            query=PAGE,
            errors=(404,),
        ),
        openai_route(
            "GET",
            f"{JOBS}/{{id}}",
            api.get_tuning,
            "Show a job in OpenAI's format",
            response=FineTuningJob,
            errors=(404,),
        ),
        *(
            openai_route(
                "POST",
                f"{JOBS}/{{id}}/{name}",
                handler,
                f"{verb} a job",
                response=FineTuningJob,
                errors=(404, 409, 507),
            )
            for name, handler, verb in changes
        ),
        openai_route(
            "GET",
            f"{JOBS}/{{id}}/events",
            api.tuning_events,
            "List a job's events, newest first",
            response=FineTuningEventList,
            query=PAGE,
            errors=(404,),
        ),
        openai_route(
            "GET",
            f"{JOBS}/{{id}}/checkpoints",
            api.tuning_checkpoints,
            "List the weights of a job that requests can use",
            response=CheckpointList,
            query=PAGE,
            errors=(404,),
        ),
    )
