"""All errors that users or the machine can cause. Each leaf has one HTTP status and one code.

CoserveError
├── RequestError                     the request is wrong
│   ├── InvalidRequest 400           a value is wrong          ├── MalformedJson 400
│   ├── UnknownField 400             ├── EmptyPrompt 400       ├── PromptTooLong 400
│   ├── Unauthorized 401             ├── ForbiddenOrigin 403   ├── ForbiddenPath 403     ├── MissingScope 403
│   ├── NotFound 404                 ├── AdapterNotFound 404   ├── JobNotFound 404
│   ├── MethodNotAllowed 405         ├── RequestTimeout 408
│   ├── AdapterBusy 409              ├── WrongJobState 409     ├── NameTaken 409
│   ├── SessionEnded 410             a training session takes no more calls
│   ├── BodyTooLarge 413             ├── UnsupportedEncoding 415
│   ├── AdapterTooLarge 422          it leaves no page of the KV pool
│   ├── NonFiniteLogits 422          the adapter (or the base) computes NaN or infinity for this prompt
│   ├── JobTooLarge 422              it never fits into the GPU's memory
│   ├── IdempotencyMismatch 422      a different request has used the key
├── CorpusError 422                  a row is wrong (`line`)
│   ├── MalformedRow                 ├── NoTargets             ├── EmptyCorpus
│   ├── UnreadableCorpus             its file or folder is damaged, missing, or takes too much memory
├── AdapterError 422                 an adapter's files are wrong
│   ├── UnsupportedAdapter           ├── CorruptAdapter        ├── UnsafeAdapter
│   ├── BaseMismatch                 ├── ShapeMismatch
├── CapacityError                    a valid request that cannot be served now
│   ├── QueueFull 429                ├── QuotaExceeded 429     ├── Overloaded 429
│   ├── EngineUnavailable 503        ├── HelperLost 503
│   ├── RequestOutOfMemory 503       a single request does not fit into the free memory
│   ├── TooManyConnections 503       ├── Unreachable 503       raised by the SDK: no daemon answers
│   ├── StorageError                 a file could not be read or written now; its content may be valid
│   │   ├── StorageFull 507          ├── StorageFailed 500     ├── StorageBusy 503
├── JobError                         a job ended badly (never an HTTP response; status 500)
│   ├── NotLearned                   a document's adapter answers no better than the base, or than another one's
│   ├── NonFiniteLoss                ├── JobOutOfMemory        ├── CheckpointUnreadable
│   ├── EngineCrashed                the job is paused: the engine died repeatedly
├── InternalError 500                a bug of coserve; the body has no details
└── StartupError                     the daemon refuses to start (exit status 2)
    ├── ConfigError                  ├── UnsupportedBase       ├── PortInUse
    └── DataFolderInUse
EngineFault                          the engine's shared state is wrong: its process ends and is started again
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar, Final, Self


class CoserveError(Exception):
    """Base of all errors. `str(error)` is safe to show: it holds no path outside the data folder, no address, no
    traceback."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        """Return the message, prefixed with the field unless the message names it."""
        if self.field is None or re.search(rf"\b{re.escape(self.field.rpartition('.')[2])}\b", self.message):
            return self.message
        return f"{self.field}: {self.message}"


class RequestError(CoserveError):
    status = 400
    code = "request_error"


class InvalidRequest(RequestError):
    code = "invalid_request"


class MalformedJson(RequestError):
    code = "malformed_json"


class UnknownField(RequestError):
    code = "unknown_field"


class EmptyPrompt(RequestError):
    code = "empty_prompt"


class PromptTooLong(RequestError):
    """The prompt does not fit. `context`: the base's context in tokens; `length`: the prompt's tokens, None if not
    counted."""

    code = "prompt_too_long"

    def __init__(
        self, message: str, *, field: str | None = None, context: int | None = None, length: int | None = None
    ) -> None:
        super().__init__(message, field=field)
        self.context, self.length = context, length


class Unauthorized(RequestError):
    status = 401
    code = "unauthorized"


class ForbiddenOrigin(RequestError):
    status = 403
    code = "forbidden_origin"


class ForbiddenPath(RequestError):
    status = 403
    code = "forbidden_path"


class MissingScope(RequestError):
    """The API key is valid, but not for this route."""

    status = 403
    code = "missing_scope"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class AdapterNotFound(RequestError):
    status = 404
    code = "adapter_not_found"


class JobNotFound(RequestError):
    status = 404
    code = "job_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(RequestError):
    status = 408
    code = "request_timeout"


class AdapterBusy(RequestError):
    status = 409
    code = "adapter_busy"


class NameTaken(RequestError):
    """The name belongs to another project. Names are unique on a node, as those of S3's buckets are."""

    status = 409
    code = "name_taken"


class WrongJobState(RequestError):
    status = 409
    code = "wrong_job_state"


class SessionEnded(RequestError):
    """A client's training session was closed, timed out, or was lost with its engine."""

    status = 410
    code = "session_ended"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class UnsupportedEncoding(RequestError):
    status = 415
    code = "unsupported_encoding"


class NonFiniteLogits(RequestError):
    status = 422
    code = "non_finite_logits"


class IdempotencyMismatch(RequestError):
    status = 422
    code = "idempotency_mismatch"


class JobTooLarge(RequestError):
    """The job needs more memory than the GPU can give. The message has both numbers, in bytes."""

    status = 422
    code = "job_too_large"


class AdapterTooLarge(RequestError):
    status = 422
    code = "adapter_too_large"


class CorpusError(CoserveError):
    status = 422
    code = "corpus_error"

    def __init__(self, message: str, *, line: int | None = None, field: str | None = None) -> None:
        super().__init__(message if line is None else f"line {line}: {message}", field=field)
        self.line = line

    def moved(self, lines: int) -> Self:
        """Return the error with its line number raised by `lines`: from a row's number in a chunk to its number in the
        file."""
        if self.line is None:
            return self
        message = self.message.removeprefix(f"line {self.line}: ")
        return type(self)(message, line=self.line + lines, field=self.field)


class MalformedRow(CorpusError):
    code = "malformed_row"


class NoTargets(CorpusError):
    code = "no_targets"


class EmptyCorpus(CorpusError):
    code = "empty_corpus"


class UnreadableCorpus(CorpusError):
    """The corpus as a whole cannot be read: it is damaged or missing, or reading it takes too much memory."""

    code = "unreadable_corpus"


class AdapterError(CoserveError):
    status = 422
    code = "adapter_error"


class UnsupportedAdapter(AdapterError):
    code = "unsupported_adapter"


class CorruptAdapter(AdapterError):
    code = "corrupt_adapter"


class UnsafeAdapter(AdapterError):
    code = "unsafe_adapter"


class BaseMismatch(AdapterError):
    code = "base_mismatch"


class ShapeMismatch(AdapterError):
    code = "shape_mismatch"


class CapacityError(CoserveError):
    status = 503
    code = "capacity"
    retry_after: float = 0.0
    """Seconds after which another attempt may succeed; 0: unknown."""


class QueueFull(CapacityError):
    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(QueueFull):
    """The predicted TTFT misses its deadline even with training paused."""

    code = "overloaded"


class QuotaExceeded(QueueFull):
    """The project has used its quota."""

    code = "quota_exceeded"


class EngineUnavailable(CapacityError):
    status = 503
    code = "engine_unavailable"


class HelperLost(CapacityError):
    """The helper process that worked on the request was killed, for example by the kernel's out-of-memory killer."""

    status = 503
    code = "helper_lost"


class RequestOutOfMemory(CapacityError):
    code = "out_of_memory"


class TooManyConnections(CapacityError):
    code = "too_many_connections"


class StorageError(CapacityError):
    """A file could not be read or written now. A retry may succeed; the file's content may be valid."""

    code = "storage_error"


class StorageFull(StorageError):
    status = 507
    code = "storage_full"


class StorageBusy(StorageError):
    """The machine is out of file descriptors or memory, or another process holds a lock."""

    code = "storage_busy"


class StorageFailed(StorageError):
    """The disk reported a read or write error."""

    status = 500
    code = "storage_failed"


class TrackingFailed(CoserveError):
    """An experiment tracker's library or server refused a job's metrics. The job goes on."""

    code = "tracking_failed"


class Unreachable(CapacityError):
    """The SDK could not reach the daemon, or the connection broke. `sent`: the request was sent, so the daemon may have
    executed it."""

    status = 503
    code = "unreachable"

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


class JobError(CoserveError):
    code = "job_error"


class NotLearned(JobError):
    """The adapter of a document answers held-out questions no better than the base does without the document, or than
    another document's adapter does. It is not published."""

    code = "not_learned"


class NonFiniteLoss(JobError):
    code = "non_finite_loss"


class EngineCrashed(JobError):
    """The daemon paused the job because the engine died repeatedly."""

    code = "engine_crashed"


class CheckpointUnreadable(JobError):
    code = "checkpoint_unreadable"


class JobOutOfMemory(JobError):
    code = "job_out_of_memory"


class InternalError(CoserveError):
    code = "internal_error"


class StartupError(CoserveError):
    code = "startup_error"


class ConfigError(StartupError):
    code = "config_error"


class UnsupportedBase(StartupError):
    code = "unsupported_base"


class PortInUse(StartupError):
    code = "port_in_use"


class DataFolderInUse(StartupError):
    code = "data_folder_in_use"


class EngineFault(Exception):
    """The engine's shared state may be corrupt, so its process must end. Any other error ends only the request or job
    that raised it."""


def failure_text(error: Exception) -> tuple[str, str]:
    """Return code and message for the end of a request or job. An internal error shows only its type."""
    if isinstance(error, CoserveError):
        return error.code, error.message
    return InternalError.code, f"internal error ({type(error).__name__}); the daemon's log says where"


def _subclasses(root: type[CoserveError]) -> Iterator[type[CoserveError]]:
    for error in root.__subclasses__():
        yield error
        yield from _subclasses(error)


BY_CODE: Final = {error.code: error for error in _subclasses(CoserveError)}


def error_from_code(code: str, message: str, retry_after: float | None = None) -> CoserveError:
    """Return the error that another process sent by its code; an unknown code becomes `InternalError`."""
    kind = BY_CODE.get(code)
    if kind is None:
        return InternalError(f"{code}: {message}")
    error = kind(message)
    if retry_after is not None and isinstance(error, QueueFull):
        error.retry_after = retry_after
    return error
