"""Fine-tuning jobs: the request, a job as it stands, its events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from coserve.core.limits import MAX_ROWS, LocalPath
from coserve.core.names import AdapterName, AdapterRefText
from coserve.core.schemas.errors import ErrorInfo
from coserve.core.schemas.generation import Finish
from coserve.core.step_metrics import StepMetrics
from coserve.core.types import JobState, LoraRequest, LoraSettings, TrainingRequest, TrainingSettings, Wire

ROWS = """Rows, each of one of these formats (docs/guide/data.md says how each is rendered and what of it is learned):
`{"text": "..."}`;
`{"prompt": "...", "completion": "..."}`, as texts or as lists of messages, then with `tools` if there are any;
`{"messages": [{"role": "system|user|assistant|tool", "content": "...", "weight": 0 or 1}], "tools": [...]}` (messages
are those of requests, with `tool_calls`, `tool_call_id` and `name`; only the assistant's have `weight`; rows of
messages may have `chat_template_kwargs`, too);
`{"instruction": "...", "input": "...", "output": "..."}` (alpaca; `input` may be left out);
`{"conversations": [{"from": "human|gpt|system|tool", "value": "..."}]}` (ShareGPT);
for `training.loss` of type `dpo`, `{"prompt": "...", "chosen": "...", "rejected": "..."}`, as texts or as lists
of messages; of messages, `prompt` may be left out if both others begin with it."""


RowField = Literal[
    "text",
    "prompt",
    "completion",
    "messages",
    "tools",
    "instruction",
    "input",
    "output",
    "conversations",
    "chosen",
    "rejected",
]
OnConflict = Literal["wait", "fork", "refuse"]


class FinetuneRequest(Wire, frozen=True, omit_defaults=True):
    """`POST /finetune`: as a JSON body with `data` or `path`, or as multipart/form-data with a part `settings` (this,
    as JSON, without both) and then a part `file` (a corpus as `path` takes it). A header `Idempotency-Key` makes the
    request safe to repeat.

    The answer comes once the whole corpus is tokenised; with `Accept: text/event-stream` events say how far it is.
    """

    adapter: AdapterName
    data: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ROWS, description=ROWS)] | None = None
    path: LocalPath | None = None
    """A file of JSON Lines, CSV, parquet or a JSON array, or a folder of `Dataset.save_to_disk`, under the daemon's
    `data_root`."""
    columns: Annotated[dict[RowField, Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] = {}
    """By field of a row's format: the column of the corpus that it is read from, such as
    `{"prompt": "question", "completion": "answer"}`. A field that is not named is read from the column of its own name.
    Columns that are not used are in the job's `notes`."""
    continue_from: AdapterRefText | None = None
    """Go on from this adapter instead of a new one; then `lora` must be left out."""
    on_conflict: OnConflict = "wait"
    """If an unfinished job trains `adapter` too. `wait`: a job whose `continue_from` is its own adapter, without a
    version, waits for the earlier job and continues from the version that it publishes, or from the current one if it
    fails or is cancelled; other jobs begin beside it. `fork`: begin beside it, from the current version. `refuse`:
    409."""
    teacher: AdapterRefText | None = None
    """Distillation: learn this adapter's outputs at the rows' targets, not their tokens. Losses are then KL divergences
    from it. The base itself cannot be a teacher."""
    lora: LoraRequest | None = None
    training: TrainingRequest = TrainingRequest()
    metadata: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
    ] = {}


class Sample(Wire, frozen=True):
    """What a job's adapter, as it was after `step`, generated of one of `training.sample_prompts`."""

    step: int
    prompt: int
    """The prompt's index."""
    text: str
    finish_reason: Finish


class Job(Wire, frozen=True):
    """A fine-tuning job as it stands now."""

    id: str
    adapter: str
    version: int
    """The version that success publishes."""
    state: JobState
    created_at: float
    started_at: float | None
    finished_at: float | None
    queue_position: int | None
    """0 is next; null unless queued."""
    step: int
    total_steps: int
    progress: float
    """0 to 1."""
    eta: float | None
    """Seconds until the last step, by the wall clock, at the rate of the recent steps: requests and other jobs, for
    which this one waits, count; pauses do not. As of the last step; null before the first one and at the end."""
    loss: float | None
    metrics: StepMetrics | None
    trained_tokens: int
    rows: int
    tokens: int
    target_tokens: int
    continue_from: str | None
    lora: LoraSettings
    training: TrainingSettings
    metadata: dict[str, str]
    error: ErrorInfo | None
    """Why the job failed, or why the daemon paused it: its engine died again and again (`engine_crashed`)."""
    result: str | None
    """`name@version` once succeeded: use it as `adapter` of `POST /generate`."""
    waiting: str | None = None
    """What a job waits for: `waiting for space` once all its steps are done and the disk is full; `waiting for memory`,
    with the numbers, while it is in line and does not fit beside the jobs that train; an earlier job of its adapter,
    from whose version it continues (`on_conflict`), and whether that one is paused; a daemon that can train it, with
    another `--tp` or base."""
    rows_cut: int = 0
    """Rows that lost a part: they were longer than `training.max_length`, the base's context or
    `micro_batch_tokens`."""
    auto: list[str] = []
    """The fields of `training` that the daemon chose from the size of the corpus and of the base."""
    notes: list[str] = []
    """Notes for the user who submitted the job, such as that it replaces another version."""
    teacher: str | None = None
    samples: list[Sample] = []
    """Those of the last step that has any, by prompt. The events have all."""
    stopped_early: bool = False
    """It succeeded before `total_steps`: `early_stopping_patience` evaluations brought no gain."""
    published_step: int | None = None
    """After which the published weights were taken, once succeeded: with early stopping the best ones, whose validation
    loss is `metrics.best_valid_loss`, else the last ones."""


class DeletedJob(Wire, frozen=True):
    """A job that is no more, with its events."""

    id: str
    adapter: str
    result: str | None
    """The version that it published, which stays."""


class Preparing(Wire, frozen=True):
    """A corpus that is being tokenised, before its job exists."""

    adapter: str
    started_at: float
    rows: int
    """Tokenised so far."""
    progress: float
    """0 to 1."""


class SubmissionEvent(Wire, frozen=True):
    """An event of `POST /finetune` with `Accept: text/event-stream`: how far the corpus is, then, as the last event,
    the job.

    A refusal is an event `error` with an `ErrorBody`, or an HTTP error if it comes before the first event.
    """

    preparing: Preparing | None = None
    job: Job | None = None


class JobList(Wire, frozen=True):
    """Newest first; the next page is `?after=<id of the last one>`."""

    data: list[Job]
    has_more: bool
    preparing: list[Preparing] = []
    """Large corpora that are being tokenised for jobs to come, on the first page."""


EventLevel = Literal["info", "warning", "error"]
EventType = Literal["state", "message", "metrics", "checkpoint", "sample"]


class JobEvent(Wire, frozen=True):
    """One event of a job, as the registry stores it. `seq` counts from 1 within the job, without gaps.

    `GET /finetune/{id}/events` sends them as server-sent events; `id:` is `seq` (send it back as `Last-Event-ID`).
    """

    seq: int
    job: str
    created_at: float
    level: EventLevel
    type: EventType
    message: str
    metrics: StepMetrics | None = None
    state: JobState | None = None
    """The new state, for `type: state`. The stream ends after a terminal one."""
    eta: float | None = None
    """For `type: metrics`: as `Job.eta` after this step."""
    sample: Sample | None = None
    """For `type: sample`."""
