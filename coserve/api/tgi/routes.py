"""The routes of LoRAX and TGI."""

from __future__ import annotations

from coserve.api.http.route import BODY_ERRORS, BUSY, Route
from coserve.api.tgi.errors import TGI_ERRORS
from coserve.api.tgi.handlers import TgiApi
from coserve.api.tgi.schemas import TgiInfo, TgiRequest, TgiResponse, TgiStreamEvent


def tgi_routes(api: TgiApi) -> tuple[Route, ...]:
    """The routes of LoRAX and TGI, except `/generate` and `/health`."""
    errors = (404, 422, *BODY_ERRORS, BUSY)
    return (
        Route(
            "POST",
            "/",
            api.generate_root,
            "Generate text, as the clients of LoRAX, TGI and huggingface_hub ask for it",
            body=TgiRequest,
            response=TgiResponse,
            listed=True,
            events=TgiStreamEvent,
            errors=errors,
            error_formats=(TGI_ERRORS,),
        ),
        Route("GET", "/info", api.info, "The base and the limits, as TGI says them", response=TgiInfo),
        Route(
            "POST",
            "/generate_stream",
            api.generate_stream,
            "Generate text as LoRAX and TGI do, a token an event",
            body=TgiRequest,
            events=TgiStreamEvent,
            errors=errors,
            error_formats=(TGI_ERRORS,),
        ),
    )
