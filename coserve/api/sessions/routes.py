"""The routes of `/sessions`."""

from __future__ import annotations

from coserve.api.http.route import BODY_ERRORS, BUSY, Route, Schema
from coserve.api.http.security import Handler
from coserve.api.sessions.handlers import SessionsApi
from coserve.core.training import schemas


def session_routes(api: SessionsApi) -> tuple[Route, ...]:
    calls: tuple[tuple[str, Handler, str, Schema, Schema], ...] = (
        (
            "forward_backward",
            api.forward_backward,
            "Add the gradients of a batch's loss",
            schemas.ComputeRequest,
            schemas.ComputeResult,
        ),
        ("forward", api.forward, "Compute a batch's loss", schemas.ComputeRequest, schemas.ComputeResult),
        ("optim_step", api.optim_step, "Update the weights", schemas.OptimStepRequest, schemas.OptimStepResult),
        ("save", api.save_session, "Save weights and moments", schemas.SaveStateRequest, schemas.SavedState),
        (
            "publish",
            api.publish_session,
            "Publish the weights as an adapter",
            schemas.PublishRequest,
            schemas.PublishedAdapter,
        ),
    )
    return (
        Route(
            "POST",
            "/sessions",
            api.open_session,
            "Open a training session, whose steps come from you",
            body=schemas.SessionRequest,
            response=schemas.Session,
            errors=(*BODY_ERRORS, 404, 410, 422, BUSY),
        ),
        Route("GET", "/sessions/{id}", api.get_session, "Show a session", response=schemas.Session, errors=(404,)),
        Route(
            "DELETE",
            "/sessions/{id}",
            api.close_session,
            "End a session and free its memory",
            response=schemas.ClosedSession,
            errors=(404,),
        ),
        *(
            Route(
                "POST",
                f"/sessions/{{id}}/{name}",
                handler,
                summary,
                body=body,
                response=response,
                errors=(*BODY_ERRORS, 404, 410, BUSY, 507),
            )
            for name, handler, summary, body, response in calls
        ),
    )
