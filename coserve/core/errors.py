"""All errors that users or the machine can cause. Each leaf has one HTTP status and one code.

A leaf's docstring is its entry in docs/reference/troubleshooting.md: a sentence of what it means, then what to do.

CoserveError
├── RequestError      the request is wrong
├── CorpusError       a row is wrong (`line`)
├── AdapterError      an adapter's files are wrong
├── CapacityError     a valid request that cannot be served now
│   └── StorageError  a file could not be read or written now
├── TrackingFailed    an experiment tracker refused metrics
├── JobError          a job ended badly (never an HTTP response; status 500)
├── InternalError     a bug of coserve
└── StartupError      the daemon refuses to start (exit status 2)
EngineFault           the engine's shared state is wrong: its process ends and is started again
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

    def __init_subclass__(cls, *, code: str | None = None, status: int | None = None) -> None:
        cls.code, cls.status = code or cls.code, status or cls.status

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def __str__(self) -> str:
        """Return the message, prefixed with the field unless the message names it."""
        name = (self.field or "").rpartition(".")[2]
        if self.field is None or re.search(rf"(?<!\w){re.escape(name)}(?!\w)", self.message):
            return self.message
        return f"{self.field}: {self.message}"


class RequestError(CoserveError, code="request_error", status=400):
    """The request is wrong."""


class InvalidRequest(RequestError, code="invalid_request"):
    """A value is wrong. The message names the field, what was expected and what was given."""


class MalformedJson(RequestError, code="malformed_json"):
    """The body is not JSON. The message says at which byte; look at quotes, commas and the shell's escaping."""


class UnknownField(RequestError, code="unknown_field"):
    """A field is not known. The message suggests the nearest name; [http.md](http.md) lists the fields of each
    route."""


class EmptyPrompt(RequestError, code="empty_prompt"):
    """The prompt has no token. Send a text, token ids or messages that are not empty."""


class PromptTooLong(RequestError, code="prompt_too_long"):
    """The prompt does not fit into the base's context or the KV pool. Shorten it, lower `max_tokens`, or raise
    `--kv-tokens`."""

    def __init__(
        self, message: str, *, field: str | None = None, context: int | None = None, length: int | None = None
    ) -> None:
        """`context`: the base's context in tokens; `length`: the prompt's tokens, None if not counted."""
        super().__init__(message, field=field)
        self.context, self.length = context, length


class Unauthorized(RequestError, code="unauthorized", status=401):
    """The request has no valid API key. Send `Authorization: Bearer KEY`; the SDK and the commands read
    `COSERVE_API_KEY`."""


class ForbiddenOrigin(RequestError, code="forbidden_origin", status=403):
    """The request names a host or an origin that the daemon does not allow. Add the daemon's name to `--allowed-hosts`,
    or the web page's origin to `--allowed-origins`."""


class ForbiddenPath(RequestError, code="forbidden_path", status=403):
    """The daemon does not read this path. Start it with `--data-root` and name a path below, or upload the file."""


class MissingScope(RequestError, code="missing_scope", status=403):
    """The API key is valid, but not for this route. Use a key with the scope in the message (`coserve keys create`)."""


class NotFound(RequestError, code="not_found", status=404):
    """There is no such route, file or other thing, or it belongs to another project. Check the name and the URL."""


class AdapterNotFound(RequestError, code="adapter_not_found", status=404):
    """There is no such adapter or version. `coserve adapters list` shows those there are; a job's appears when the job
    ends."""


class JobNotFound(RequestError, code="job_not_found", status=404):
    """There is no such job, or its record is damaged. `coserve jobs list` shows the others; delete a damaged one."""


class MethodNotAllowed(RequestError, code="method_not_allowed", status=405):
    """The route has no such method. The header `Allow` lists those it has."""


class RequestTimeout(RequestError, code="request_timeout", status=408):
    """The body did not arrive in time. Send it again; large corpora are better uploaded as files."""


class AdapterBusy(RequestError, code="adapter_busy", status=409):
    """An unfinished job needs the adapter. Wait for the job, cancel it, or set `on_conflict` of a new one."""


class NameTaken(RequestError, code="name_taken", status=409):
    """The name belongs to another project (names are unique on a node), or to an existing adapter or alias. Choose
    another one."""


class WrongJobState(RequestError, code="wrong_job_state", status=409):
    """The job is not in a state that allows this. The message has its state."""


class SessionEnded(RequestError, code="session_ended", status=410):
    """A client's training session was closed, timed out, or was lost with its engine. Create another from its last
    saved state."""


class BodyTooLarge(RequestError, code="body_too_large", status=413):
    """The body is larger than `--max-body-bytes`, or its rows are. Upload a file, or name one below `--data-root` as
    `path`."""


class StorageQuotaExceeded(RequestError, code="storage_quota_exceeded", status=413):
    """The project's files and adapters would exceed its quota of bytes, which the message has. Delete some, or raise
    the quota (`coserve quotas`)."""


class UnsupportedEncoding(RequestError, code="unsupported_encoding", status=415):
    """The body's type or encoding is not one that the route reads. Send JSON, or multipart/form-data where there are
    files."""


class NonFiniteLogits(RequestError, code="non_finite_logits", status=422):
    """The adapter, or the base, computes NaN or infinity for this prompt. Roll the adapter back; train with a lower
    rate."""


class IdempotencyMismatch(RequestError, code="idempotency_mismatch", status=422):
    """Another request has used this `Idempotency-Key`. The message names the fields that differ; use a new key."""


class JobTooLarge(RequestError, code="job_too_large", status=422):
    """The job never fits into the GPU's memory; the message has both sizes. Lower `max_length`, the rank or
    `micro_batch_tokens`."""


class AdapterTooLarge(RequestError, code="adapter_too_large", status=422):
    """The adapter would leave no page of the KV pool. Start with the `--kv-tokens` that the message names, or lower the
    rank."""


class CorpusError(CoserveError, code="corpus_error", status=422):
    """A corpus is wrong. The message has the line."""

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


class MalformedRow(CorpusError, code="malformed_row"):
    """A row has no known format, or the base's chat template refuses it. Correct the line; [data.md](../guide/data.md)
    shows the formats."""


class NoTargets(CorpusError, code="no_targets"):
    """A row has nothing to learn, or its answer begins where the row is cut. Look at `train_on` and `max_length`."""


class EmptyCorpus(CorpusError, code="empty_corpus"):
    """The corpus has no row. Check the file and its columns."""


class UnreadableCorpus(CorpusError, code="unreadable_corpus"):
    """The corpus as a whole cannot be read: it is damaged or missing, or takes too much memory. Write the file again,
    or split it."""


class AdapterError(CoserveError, code="adapter_error", status=422):
    """An adapter's files are wrong."""


class UnsupportedAdapter(AdapterError, code="unsupported_adapter"):
    """The adapter is of a kind that is not served. The message names the setting, and a way to convert the adapter if
    there is one."""


class CorruptAdapter(AdapterError, code="corrupt_adapter"):
    """The adapter's files are damaged or incomplete. Save or download them again."""


class UnsafeAdapter(AdapterError, code="unsafe_adapter"):
    """The upload has files that are never opened, such as pickles or links. Save the adapter as safetensors."""


class BaseMismatch(AdapterError, code="base_mismatch"):
    """The adapter was made for another base. Start the daemon with that base (`--model`)."""


class ShapeMismatch(AdapterError, code="shape_mismatch"):
    """A tensor does not have the shape that rank and base ask for. Check `r` and the base in `adapter_config.json`."""


class CapacityError(CoserveError, code="capacity", status=503):
    """A valid request cannot be served now."""

    retry_after: float = 0.0
    """Seconds after which another attempt may succeed; 0: unknown."""


class QueueFull(CapacityError, code="queue_full", status=429):
    """The queue is full, or too many uploads run. Try again after `Retry-After` seconds; for requests raise
    `--max-queue`, or add a node; send fewer uploads at once."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(QueueFull, code="overloaded"):
    """The predicted TTFT misses its deadline even with training paused. Try again after `Retry-After`, or ask for a
    later target."""


class QuotaExceeded(QueueFull, code="quota_exceeded"):
    """The project has used its quota of requests, tokens or jobs. Try again after `Retry-After`; `coserve quotas` shows
    and sets quotas."""


class EngineUnavailable(CapacityError, code="engine_unavailable", status=503):
    """The engine starts, restarts or stops. Wait for `/health` to say `ready`; its notes and the daemon's log tell
    why."""


class HelperLost(CapacityError, code="helper_lost", status=503):
    """The helper process of the request was killed, for example by the kernel's out-of-memory killer. Try again; look
    at host memory."""


class LoraServerLost(CapacityError, code="lora_server_lost", status=503):
    """A LoRA server ended or did not answer, and the adapter does not fit into the engine's pages. Try again once
    `/health` shows it `ready`; raise `--kv-tokens`."""


class RequestOutOfMemory(CapacityError, code="out_of_memory"):
    """A single request does not fit into the free GPU memory. Try again; shorten the prompt, or lower
    `--memory-fraction`."""


class TooManyConnections(CapacityError, code="too_many_connections"):
    """All connections are busy. Reuse connections, close idle ones, or raise `--max-connections`."""


class StorageError(CapacityError, code="storage_error"):
    """A file could not be read or written now. Try again: its content may be valid."""


class StorageFull(StorageError, code="storage_full", status=507):
    """The disk is full. Delete files, adapters or jobs, or enlarge the disk of `--data-dir`."""


class StorageBusy(StorageError, code="storage_busy"):
    """The machine is out of file descriptors or memory, or another process holds a lock. Try again; raise `ulimit
    -n`."""


class StorageFailed(StorageError, code="storage_failed", status=500):
    """The disk reported a read or write error. Look at the kernel's log and the disk."""


class TrackingFailed(CoserveError, code="tracking_failed"):
    """An experiment tracker's library or server refused a job's metrics; the job goes on. `/health` has the tracker's
    message."""


class Unreachable(CapacityError, code="unreachable", status=503):
    """The SDK could not reach the daemon, or the connection broke. Start the daemon, and check `COSERVE_URL`:
    `https://` where it has `--tls-cert`."""

    def __init__(self, message: str, *, sent: bool = False) -> None:
        """`sent`: the request was sent, so the daemon may have executed it."""
        super().__init__(message)
        self.sent = sent


class JobError(CoserveError, code="job_error"):
    """A job ended badly. Its record has the code and the message."""


class NotLearned(JobError, code="not_learned"):
    """A document's adapter answers held-out questions no better than the base or another document's adapter, and is not
    published. Give it more text, questions or steps."""


class NonFiniteLoss(JobError, code="non_finite_loss", status=422):
    """The loss became NaN or infinite. Lower the learning rate, clip gradients (`max_grad_norm`), and look at the
    rows."""


class EngineCrashed(JobError, code="engine_crashed"):
    """The job is paused, for the engine died repeatedly while it ran. Look at the log, then `coserve jobs resume`."""


class CheckpointUnreadable(JobError, code="checkpoint_unreadable"):
    """No checkpoint of the job can be read. Start the job again; check the disk."""


class JobOutOfMemory(JobError, code="job_out_of_memory"):
    """The job does not fit into the GPU memory that is left. Lower the rank, `max_length` or `micro_batch_tokens`."""


class InternalError(CoserveError, code="internal_error"):
    """A bug of coserve; the answer has no details. The daemon's log has the traceback: report it."""


class StartupError(CoserveError, code="startup_error"):
    """The daemon refuses to start, with exit status 2."""


class ConfigError(StartupError, code="config_error"):
    """A setting is wrong. The message names it; `coserve config` shows each value and where it comes from."""


class LoraServersMissing(StartupError, code="lora_servers_missing"):
    """LoRA servers did not start. Start those of `--lora-server-at` first (`coserve lora-server`). An engine that is
    started again tries it several times."""


class LoraServersDiffer(LoraServersMissing, code="lora_servers_differ"):
    """LoRA servers of `--lora-server-at` are not of the daemon's version of coserve. Start the older ones again, with
    `coserve lora-server`, or the daemon: the message has both versions."""


class LoraServersSilent(LoraServersMissing, code="lora_servers_silent"):
    """A LoRA server of `--lora-server-at` hangs: it took the connection and said nothing, and was ended. Start the
    daemon once `coserve lora-server` has started it again."""


class UnsupportedBase(StartupError, code="unsupported_base"):
    """The base cannot be served. The message says what is missing; [families.md](../guide/families.md) lists the
    bases."""


class PortInUse(StartupError, code="port_in_use"):
    """Another program has the port. Choose another (`--port`), or end that program."""


class DataFolderInUse(StartupError, code="data_folder_in_use"):
    """A running daemon uses the data folder. Choose another (`--data-dir`), or stop that daemon (`coserve stop`)."""


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
