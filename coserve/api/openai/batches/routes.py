"""The routes of `/v1/batches`."""

from __future__ import annotations

from coserve.api.http.route import BODY_ERRORS, BUSY, PAGE, Route
from coserve.api.openai.batches.handlers import BatchesApi
from coserve.api.openai.batches.schemas import Batch, BatchList, NewBatch
from coserve.api.openai.errors import openai_route


def batch_routes(api: BatchesApi) -> tuple[Route, ...]:
    return (
        openai_route(
            "POST",
            "/v1/batches",
            api.create_batch,
            "Answer the requests of a file, when others leave room",
            body=NewBatch,
            response=Batch,
            errors=(404, *BODY_ERRORS, BUSY, 507),
        ),
        openai_route(
            "GET",
            "/v1/batches",
            api.list_batches,
            "List batches, newest first",
            response=BatchList,
            query=PAGE,
            errors=(404,),
        ),
        openai_route(
            "GET",
            "/v1/batches/{id}",
            api.get_batch,
            "Show a batch",
            response=Batch,
            errors=(404,),
        ),
        openai_route(
            "POST",
            "/v1/batches/{id}/cancel",
            api.cancel_batch,
            "Cancel a batch; answers that it has are kept",
            response=Batch,
            errors=(404, 507),
        ),
    )
