"""`/v1/batches`, and how the requests of a batch are answered, by endpoint."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from coserve.api.http.bodies import BodyReader
from coserve.api.http.body_types import refuse_unsupported
from coserve.api.http.json_blocks import encode_json
from coserve.api.http.route import PAGE
from coserve.api.openai.batches.runner import Answer, BatchRunner
from coserve.api.openai.batches.schemas import Batch, BatchList, BatchProblems, NewBatch, RequestCounts
from coserve.api.openai.batches.store import BatchRecord
from coserve.api.openai.errors import openai_route
from coserve.api.openai.handlers import OpenAIApi
from coserve.api.openai.lists import behind, list_query
from coserve.api.openai.responses.handlers import ResponsesApi
from coserve.api.openai.responses.schemas import Response, ResponseRequest
from coserve.api.openai.schemas import ChatRequest, CompletionRequest
from coserve.core.access.principal import principal
from coserve.core.errors import InvalidRequest
from coserve.core.limits import PAGE_LIMIT


class BatchesApi:
    def __init__(self, runner: BatchRunner) -> None:
        self._store, self._runner = runner.store, runner

    @openai_route("POST", "/v1/batches", "Answer the requests of a file, when others leave room", errors=(404, 507))
    async def create_batch(self, body: NewBatch) -> Batch:
        refuse_unsupported(body)
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            metadata=body.metadata,
            created_at=time.time(),
            project=principal().project,
        )
        await self._runner.create(record)
        return batch(record)

    @openai_route("GET", "/v1/batches", "List batches, newest first", query=PAGE, errors=(404,))
    async def list_batches(self, request: web.Request) -> BatchList:
        after, limit = list_query(request.query, (), PAGE_LIMIT)
        records = behind(self._store.all()[::-1], after)
        data = [batch(record) for record in records[:limit]]
        return BatchList.of(data, has_more=len(records) > limit)

    @openai_route("GET", "/v1/batches/{id}", "Show a batch")
    async def get_batch(self, id: str) -> Batch:
        return batch(self._store.get(id))

    @openai_route("POST", "/v1/batches/{id}/cancel", "Cancel a batch; answers that it has are kept", errors=(507,))
    async def cancel_batch(self, id: str) -> Batch:
        return batch(await self._runner.cancel(id))


def batch(record: BatchRecord) -> Batch:
    def at(time: float | None, *, only: str | None = None) -> int | None:
        return None if time is None or only not in (None, record.status) else int(time)

    return Batch(
        id=record.id,
        endpoint=record.endpoint,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,
        errors=BatchProblems(record.problems) if record.problems else None,
        output_file_id=record.output_file_id,
        error_file_id=record.error_file_id,
        request_counts=RequestCounts(record.total, record.completed, record.failed),
        metadata=record.metadata,
        created_at=int(record.created_at),
        in_progress_at=at(record.in_progress_at),
        finalizing_at=at(record.finalizing_at),
        cancelling_at=at(record.cancelling_at),
        completed_at=at(record.ended_at, only="completed"),
        failed_at=at(record.ended_at, only="failed"),
        cancelled_at=at(record.ended_at, only="cancelled"),
    )


RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest, ResponseRequest)


def batch_answers(api: OpenAIApi, responses: ResponsesApi, bodies: BodyReader) -> dict[str, Answer]:
    """Return the function that answers a body, by endpoint."""

    async def respond(body: ResponseRequest) -> Response:
        return await responses.answer(msgspec.structs.replace(body, store=False))  # its file has them

    return {
        "/v1/chat/completions": _answer(bodies, ChatRequest, api.answer_chat),
        "/v1/completions": _answer(bodies, CompletionRequest, api.answer_completion),
        "/v1/responses": _answer(bodies, ResponseRequest, respond),
    }


def _answer(bodies: BodyReader, kind: type[RequestT], of: Callable[[RequestT], Awaitable[msgspec.Struct]]) -> Answer:
    async def answer(content: bytes) -> bytes:
        body = await bodies.decode(content, kind, dialect=True)
        if body.stream:
            raise InvalidRequest("expected it left out in a batch", field="stream")
        if body.slo_class is None and body.service_tier != "priority":
            body = msgspec.structs.replace(body, slo_class="batch")
        return b"".join(encode_json(await of(body)))

    return answer
