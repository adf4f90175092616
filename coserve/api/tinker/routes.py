"""The routes of Tinker's API, `/api/v1`."""

from __future__ import annotations

from dataclasses import replace

from coserve.api.http.route import BODY_ERRORS, BUSY, Route, Schema
from coserve.api.http.security import Handler
from coserve.api.tinker import schemas
from coserve.api.tinker.errors import TINKER_ERRORS
from coserve.api.tinker.handlers import TinkerApi

PREFIX = "/api/v1"
RESULTS: Schema = (
    schemas.TryAgain,
    schemas.TinkerError,
    schemas.ModelResult,
    schemas.StepResult,
    schemas.PathResult,
)
FUTURE = schemas.TinkerFuture


def tinker_routes(api: TinkerApi) -> tuple[Route, ...]:
    return (*_service_routes(api), *_model_routes(api), *_sampling_routes(api), *_saved_routes(api))


def _route(
    method: str,
    path: str,
    handler: Handler,
    summary: str,
    response: Schema,
    errors: tuple[int, ...] = (),
) -> Route:
    summary, formats = f"Tinker: {summary}", (TINKER_ERRORS,)
    return Route(method, f"{PREFIX}/{path}", handler, summary, response=response, errors=errors, error_formats=formats)


def _post(
    path: str, handler: Handler, summary: str, body: Schema | None, response: Schema, *, compressed: bool = False
) -> Route:
    errors = (*BODY_ERRORS, 404, 410, 422, BUSY)
    return replace(_route("POST", path, handler, summary, response, errors), body=body, compressed=compressed)


def _service_routes(api: TinkerApi) -> tuple[Route, ...]:
    """The service, and sessions of the SDK."""
    config = schemas.TinkerConfigRequest
    return (
        _route("GET", "healthz", api.tinker_healthz, "Whether the daemon answers", schemas.TinkerHealth),
        _route("GET", "get_server_capabilities", api.tinker_capabilities, "The base", schemas.Capabilities),
        _post("client/config", api.tinker_client_config, "Settings of the SDK", config, schemas.TinkerConfig),
        _post("client/dynamic_config", api.tinker_dynamic_config, "Further ones", config, schemas.TinkerDynamicConfig),
        _post("telemetry", api.tinker_telemetry, "Reports of the SDK, which are dropped", None, schemas.Accepted),
        _post(
            "create_session",
            api.tinker_create_session,
            "Begin a session",
            schemas.CreateSession,
            schemas.TinkerSession,
        ),
        _post(
            "session_heartbeat",
            api.tinker_session_heartbeat,
            "Keep a session's models in memory",
            schemas.OfSession,
            schemas.Heartbeat,
        ),
        _post(
            "sessions/{id}/finish",
            api.tinker_finish_session,
            "End a session",
            schemas.FinishSession,
            schemas.Accepted,
        ),
        _post(
            "retrieve_future",
            api.tinker_retrieve_future,
            "Wait for a result; samples and forwards are protobuf",
            schemas.RetrieveFuture,
            RESULTS,
        ),
        _post("cancel_future", api.tinker_cancel_future, "Cancel a sample", schemas.RetrieveFuture, schemas.Accepted),
    )


def _model_routes(api: TinkerApi) -> tuple[Route, ...]:
    """Models in training, and their calls."""
    return (
        _post("create_model", api.tinker_create_model, "Begin to train an adapter", schemas.CreateModel, FUTURE),
        _post("unload_model", api.tinker_unload_model, "Free a model's memory", schemas.OfModel, FUTURE),
        _post("get_info", api.tinker_get_info, "Show a model", schemas.OfModel, schemas.ModelInfo),
        _post(
            "forward_backward",
            api.tinker_forward_backward,
            "Forward and backward; the body is protobuf",
            None,
            FUTURE,
            compressed=True,
        ),
        _post("optim_step", api.tinker_optim_step, "Update the weights", schemas.OptimStep, FUTURE),
        _post("save_weights", api.tinker_save_weights, "Save weights and moments", schemas.SaveWeights, FUTURE),
        _post("load_weights", api.tinker_load_weights, "Load a saved state", schemas.LoadWeights, FUTURE),
        _post(
            "save_weights_for_sampler",
            api.tinker_save_weights_for_sampler,
            "Serve a model's weights",
            schemas.SaveForSampler,
            FUTURE,
        ),
    )


def _sampling_routes(api: TinkerApi) -> tuple[Route, ...]:
    return (
        _post(
            "create_sampling_session",
            api.tinker_create_sampling_session,
            "Choose what to sample from",
            schemas.CreateSamplingSession,
            schemas.SamplingSession,
        ),
        _post("asample", api.tinker_sample, "Sample", schemas.TinkerSample, FUTURE),
        _route(
            "GET",
            "samplers/{id}",
            api.tinker_get_sampler,
            "Show what a sampling session samples from",
            schemas.Sampler,
            (404, 410, 422),
        ),
    )


def _saved_routes(api: TinkerApi) -> tuple[Route, ...]:
    """Saved states."""
    return (
        _post("weights_info", api.tinker_weights_info, "Show a saved state", schemas.WeightsPath, schemas.WeightsInfo),
        _route(
            "GET",
            "training_runs/{id}/checkpoints",
            api.tinker_list_checkpoints,
            "List a model's saved states",
            schemas.TinkerCheckpoints,
            (404, 410, 422),
        ),
        replace(
            _route(
                "DELETE",
                "training_runs/{id}",
                api.tinker_delete_checkpoint,
                "Delete a saved state, `MODEL/checkpoints/weights/NAME`",
                schemas.Accepted,
                (404, 422, 507),
            ),
            slashes=True,
        ),
    )
