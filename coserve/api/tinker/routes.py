"""The routes of Tinker's API, `/api/v1`."""

from __future__ import annotations

from coserve.api.http.route import BODY_ERRORS, BUSY, Route, Schema
from coserve.api.http.security import Handler
from coserve.api.tinker import schemas
from coserve.api.tinker.errors import TINKER_ERRORS
from coserve.api.tinker.handlers import TinkerApi

PREFIX = "/api/v1"


def tinker_routes(api: TinkerApi) -> tuple[Route, ...]:
    future = schemas.TinkerFuture
    result: Schema = (
        schemas.TryAgain,
        schemas.TinkerError,
        schemas.ModelResult,
        schemas.StepResult,
        schemas.PathResult,
    )
    config = schemas.TinkerConfigRequest
    posts: tuple[tuple[str, Handler, str, Schema | None, Schema], ...] = (
        ("client/config", api.tinker_client_config, "Settings of the SDK", config, schemas.TinkerConfig),
        ("client/dynamic_config", api.tinker_dynamic_config, "Further ones", config, schemas.TinkerDynamicConfig),
        ("telemetry", api.tinker_telemetry, "Reports of the SDK, which are dropped", None, schemas.Accepted),
        (
            "create_session",
            api.tinker_create_session,
            "Begin a session",
            schemas.CreateSession,
            schemas.TinkerSession,
        ),
        (
            "session_heartbeat",
            api.tinker_session_heartbeat,
            "Keep a session's models in memory",
            schemas.OfSession,
            schemas.Heartbeat,
        ),
        ("create_model", api.tinker_create_model, "Begin to train an adapter", schemas.CreateModel, future),
        ("unload_model", api.tinker_unload_model, "Free a model's memory", schemas.OfModel, future),
        ("get_info", api.tinker_get_info, "Show a model", schemas.OfModel, schemas.ModelInfo),
        ("optim_step", api.tinker_optim_step, "Update the weights", schemas.OptimStep, future),
        ("save_weights", api.tinker_save_weights, "Save weights and moments", schemas.SaveWeights, future),
        ("load_weights", api.tinker_load_weights, "Load a saved state", schemas.LoadWeights, future),
        (
            "save_weights_for_sampler",
            api.tinker_save_weights_for_sampler,
            "Serve a model's weights",
            schemas.SaveForSampler,
            future,
        ),
        (
            "create_sampling_session",
            api.tinker_create_sampling_session,
            "Choose what to sample from",
            schemas.CreateSamplingSession,
            schemas.SamplingSession,
        ),
        ("asample", api.tinker_sample, "Sample", schemas.TinkerSample, future),
        (
            "retrieve_future",
            api.tinker_retrieve_future,
            "Wait for a result; samples and forwards are protobuf",
            schemas.RetrieveFuture,
            result,
        ),
        ("cancel_future", api.tinker_cancel_future, "Cancel a sample", schemas.RetrieveFuture, schemas.Accepted),
        ("weights_info", api.tinker_weights_info, "Show a saved state", schemas.WeightsPath, schemas.WeightsInfo),
    )
    formats = (TINKER_ERRORS,)
    errors = (*BODY_ERRORS, 404, 410, 422, BUSY)
    return (
        *(
            Route(
                "POST",
                f"{PREFIX}/{path}",
                handler,
                f"Tinker: {summary}",
                body=body,
                response=response,
                errors=errors,
                error_formats=formats,
            )
            for path, handler, summary, body, response in posts
        ),
        Route(
            "POST",
            f"{PREFIX}/forward_backward",
            api.tinker_forward_backward,
            "Tinker: Forward and backward; the body is protobuf",
            response=future,
            errors=errors,
            error_formats=formats,
            compressed=True,
        ),
        Route(
            "POST",
            f"{PREFIX}/sessions/{{id}}/finish",
            api.tinker_finish_session,
            "Tinker: End a session",
            body=schemas.FinishSession,
            response=schemas.Accepted,
            errors=errors,
            error_formats=formats,
        ),
        Route(
            "GET",
            f"{PREFIX}/healthz",
            api.tinker_healthz,
            "Tinker: Whether the daemon answers",
            response=schemas.TinkerHealth,
            error_formats=formats,
        ),
        Route(
            "GET",
            f"{PREFIX}/get_server_capabilities",
            api.tinker_capabilities,
            "Tinker: The base",
            response=schemas.Capabilities,
            error_formats=formats,
        ),
        Route(
            "GET",
            f"{PREFIX}/samplers/{{id}}",
            api.tinker_get_sampler,
            "Tinker: Show what a sampling session samples from",
            response=schemas.Sampler,
            errors=(404, 410, 422),
            error_formats=formats,
        ),
        Route(
            "GET",
            f"{PREFIX}/training_runs/{{id}}/checkpoints",
            api.tinker_list_checkpoints,
            "Tinker: List a model's saved states",
            response=schemas.TinkerCheckpoints,
            errors=(404, 410, 422),
            error_formats=formats,
        ),
        Route(
            "DELETE",
            f"{PREFIX}/training_runs/{{id}}",
            api.tinker_delete_checkpoint,
            "Tinker: Delete a saved state, `MODEL/checkpoints/weights/NAME`",
            response=schemas.Accepted,
            errors=(404, 422, 507),
            error_formats=formats,
            slashes=True,
        ),
    )
