"""Bodies of `/v1/batches`, and the lines of their files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from coserve.api.http.body_types import Unsupported
from coserve.api.openai.batches.store import BatchProblem, BatchStatus
from coserve.api.openai.lists import ListPage
from coserve.core.limits import Text
from coserve.core.types import Wire

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]


class NewBatch(Wire, frozen=True):
    """Body of `POST /v1/batches`."""

    input_file_id: Text
    endpoint: Endpoint
    completion_window: Literal["24h"] = "24h"
    """Ignored: a batch runs until it is done."""
    metadata: dict[str, Any] | None = None
    output_expires_after: Annotated[Any, Unsupported()] = None


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the input file: one request."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Endpoint
    body: msgspec.Raw


class RequestCounts(Wire, frozen=True):
    total: int
    completed: int
    failed: int


class BatchProblems(Wire, frozen=True):
    data: list[BatchProblem]
    object: Literal["list"] = "list"


class Batch(Wire, frozen=True, kw_only=True):
    """A batch. Its output file has a line for each request that was answered, its error file for each that failed."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    errors: BatchProblems | None
    output_file_id: str | None
    error_file_id: str | None
    request_counts: RequestCounts
    metadata: dict[str, Any] | None
    created_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    expires_at: None = None
    expired_at: None = None


class BatchList(ListPage[Batch], frozen=True, kw_only=True):
    """Batches, newest first. The next page is `?after=<id of the last one>`."""


class BatchAnswer(Wire, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Answered(msgspec.Struct, frozen=True):
    """A request that has a result."""

    custom_id: str


class BatchResult(Answered, frozen=True):
    """A line of the output file, or of the error file: then `body` is an error."""

    id: str
    response: BatchAnswer
    error: None = None
