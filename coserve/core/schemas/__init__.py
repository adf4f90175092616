"""Requests and responses of the HTTP API: checked by the server, built by the SDK, described by `/openapi.json`.

No torch, no IO. Times are seconds since the epoch (`*_at`) or seconds (`eta`, `timing`, `slo_*`); sizes are bytes or
tokens. A streamed generation is a sequence of server-sent events `data: GenerateChunk`, then `data: [DONE]`; a failure
after the first byte is `event: error` with an `ErrorBody`. `slo_e2e` counts from arrival to the last of `max_tokens`.
"""

from __future__ import annotations

from coserve.core.messages import ChatMessage
from coserve.core.schemas.adapters import (
    Adapter,
    AdapterList,
    AdapterUpdate,
    Alias,
    AliasList,
    AliasRequest,
    ConvertedAdapter,
    ConvertRequest,
    DeletedAdapter,
    Distillation,
    ImportRequest,
    RollbackRequest,
)
from coserve.core.schemas.documents import (
    AnswerScore,
    DocumentEvaluation,
    DocumentJob,
    DocumentRequest,
    DocumentSettings,
    UserQuestion,
)
from coserve.core.schemas.errors import ErrorBody, ErrorInfo
from coserve.core.schemas.evaluation import EvalRequest, EvalResult, EvalScore
from coserve.core.schemas.generation import (
    CachedTokens,
    Choice,
    ChosenLogprob,
    Finish,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    GenerationFields,
    Logprob,
    PromptLogprob,
    Timing,
    Usage,
    token_usage,
)
from coserve.core.schemas.jobs import (
    ROWS,
    DeletedJob,
    EventLevel,
    EventType,
    FinetuneRequest,
    Job,
    JobEvent,
    JobList,
    OnConflict,
    Preparing,
    RowField,
    Sample,
    SubmissionEvent,
    ValidationRows,
)
from coserve.core.schemas.service import STREAM_END, History, HistoryPoint, Pointers

__all__ = [
    "Adapter",
    "AdapterList",
    "AdapterUpdate",
    "Alias",
    "AliasList",
    "AliasRequest",
    "AnswerScore",
    "CachedTokens",
    "ChatMessage",
    "Choice",
    "ChosenLogprob",
    "ConvertRequest",
    "ConvertedAdapter",
    "DeletedAdapter",
    "DeletedJob",
    "Distillation",
    "DocumentEvaluation",
    "DocumentJob",
    "DocumentRequest",
    "DocumentSettings",
    "ErrorBody",
    "ErrorInfo",
    "EvalRequest",
    "EvalResult",
    "EvalScore",
    "EventLevel",
    "EventType",
    "FinetuneRequest",
    "Finish",
    "GenerateChunk",
    "GenerateRequest",
    "GenerateResponse",
    "GenerationFields",
    "History",
    "HistoryPoint",
    "ImportRequest",
    "Job",
    "JobEvent",
    "JobList",
    "Preparing",
    "SubmissionEvent",
    "OnConflict",
    "Logprob",
    "Pointers",
    "PromptLogprob",
    "ROWS",
    "RollbackRequest",
    "RowField",
    "STREAM_END",
    "Sample",
    "Timing",
    "Usage",
    "UserQuestion",
    "ValidationRows",
    "token_usage",
]
