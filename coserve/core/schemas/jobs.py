"""Schemas of fine-tuning jobs: the request, the job's state, its events, and an adapter's measures on held-out rows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from coserve.core.limits import MAX_ROWS, LocalPath, Text
from coserve.core.names import AdapterName, AdapterRefText
from coserve.core.schemas.documents import DocumentJob, DocumentRequest
from coserve.core.schemas.generation import Finish
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobState
from coserve.core.training.settings import TrainingRequest, TrainingSettings
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import LoraRequest, LoraSettings, Wire

MAX_EVAL_ROWS = 1000


class EvalRequest(Wire, frozen=True, omit_defaults=True):
    """Rows that the job never learns, and how generated answers are compared with theirs: exactly unless `regex` or
    `json_field` is given. Exactly one of `data` and `path`."""

    data: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_EVAL_ROWS)] | None = None
    """Rows of texts, prompts and completions, or chats, as in `FinetuneRequest.data`."""
    path: LocalPath | None = None
    """A file or folder of at most 1000 rows under the daemon's `data_root`, in a format of `FinetuneRequest.path`;
    `FinetuneRequest.columns` names its columns, too."""
    regex: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Compare what this regular expression (RE2) finds in the texts: its first group, if it has one."""
    json_field: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Compare this field of JSON texts; `a.b` is nested."""
    max_tokens: Annotated[int, Meta(ge=1)] = 256
    """Most tokens of a generated answer."""


class EvalScore(Wire, frozen=True):
    """Means over the rows. Those of tokens are over the answers' tokens (or the texts', the first token excluded)."""

    rows: int
    tokens: int
    loss: float
    """Negative log-likelihood, nats per token."""
    token_accuracy: float
    """Fraction of tokens that have the largest logit."""
    match: float | None
    """Fraction of greedy answers that match the expected ones; None: the rows are texts."""


class EvalResult(Wire, frozen=True):
    """The measures of a job's adapter on its test rows, and those of the base."""

    adapter: EvalScore
    base: EvalScore


ROWS = """Rows, each of one of these formats (docs/guide/data.md says how each is rendered and what of it is learned):
`{"text": "..."}`;
`{"prompt": "...", "completion": "..."}`, as texts or as lists of messages, then with `tools` if there are any;
`{"messages": [{"role": "system|user|assistant|tool", "content": "...", "weight": 0 or 1}], "tools": [...]}` (messages
are those of requests, with `tool_calls`, `reasoning_content`, `tool_call_id` and `name`; only the assistant's have
`weight`; rows of messages may have `chat_template_kwargs`, too);
`{"instruction": "...", "input": "...", "output": "..."}` (alpaca; `input` may be left out);
`{"conversations": [{"from": "human|gpt|system|tool", "value": "..."}]}` (ShareGPT);
`{"input_ids": [...], "labels": [...]}` (tokenised; -100: not learned; `completion_mask` or `assistant_masks` as well);
for a `training.loss`, `{"prompt": "...", "chosen": "...", "rejected": "..."}`, as texts or as lists
of messages; of messages, `prompt` may be left out if both others begin with it; also OpenAI's rows
`{"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}`;
for the loss `kto`, `{"prompt": "...", "completion": "...", "label": true or false}`, as texts or as lists of
messages."""


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
    "input_ids",
    "labels",
    "completion_mask",
    "assistant_masks",
    "chosen",
    "rejected",
    "label",
]
OnConflict = Literal["wait", "fork", "refuse"]


class ValidationRows(Wire, frozen=True, omit_defaults=True):
    """Exactly one of `data` and `path`, of rows as those of the corpus."""

    data: Annotated[list[dict[str, Any]], Meta(max_length=MAX_EVAL_ROWS)] | None = None
    path: LocalPath | None = None
    """As `FinetuneRequest.path`."""


class FinetuneRequest(Wire, frozen=True, omit_defaults=True):
    """Body of `POST /finetune`: JSON with `data`, `path` or `document`, or multipart/form-data with a part `settings`
    (this schema as JSON, without `data` and `path`) followed by a part `file` (a corpus in a format of `path`, or a
    document) and, if there are any, a part `validation` with a file of rows for validation. A header
    `Idempotency-Key` makes the request safe to repeat.

    The answer comes once the whole corpus is tokenised; with `Accept: text/event-stream`, events report the progress.
    """

    adapter: AdapterName
    data: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ROWS, description=ROWS)] | None = None
    path: LocalPath | None = None
    """A file of JSON Lines, CSV, parquet or a JSON array, or a folder of `Dataset.save_to_disk`, under the daemon's
    `data_root`."""
    columns: Annotated[dict[RowField, Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] = {}
    """Maps a field of a row's format to the column of the corpus that holds it, such as `{"prompt": "question",
    "completion": "answer"}`. Other fields are read from the column of the same name. Unused columns are listed in the
    job's `notes`."""
    validation: ValidationRows | None = None
    """Rows that are not learned: the loss on them is measured every `training.eval_steps`. They become the last rows of
    the corpus, `training.validation_rows` of the job."""
    document: Text | DocumentRequest | None = None
    """A document to learn instead of rows: its text, or an object with more settings."""
    continue_from: AdapterRefText | None = None
    """Adapter to continue instead of a new one; `lora` must then be left out."""
    on_conflict: OnConflict = "wait"
    """Behaviour if an unfinished job trains `adapter` too. `wait`: a job whose `continue_from` is `adapter` without a
    version waits for the earlier job and continues from the version that it publishes, or from the current one if it
    fails or is cancelled; other jobs start at once. `fork`: start at once, from the current version. `refuse`: 409."""
    teacher: AdapterRefText | None = None
    """Distillation: learn this adapter's outputs at the rows' targets instead of their tokens. Losses are KL
    divergences from it. The base itself cannot be a teacher."""
    lora: LoraRequest | None = None
    test: EvalRequest | None = None
    """Rows to measure the trained adapter on, beside the base, before it is published."""
    training: TrainingRequest = TrainingRequest()
    metadata: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
    ] = {}


class Sample(Wire, frozen=True):
    """Text generated for one of `training.sample_prompts` by the job's adapter as it was after `step`."""

    step: int
    prompt: int
    """Index of the prompt in `training.sample_prompts`."""
    text: str
    finish_reason: Finish


class Job(Wire, frozen=True):
    """A fine-tuning job's current state."""

    id: str
    adapter: str
    version: int
    """The version that the job publishes when it succeeds."""
    state: JobState
    created_at: float
    started_at: float | None
    finished_at: float | None
    queue_position: int | None
    """Position in the queue, 0 is next; null unless queued."""
    step: int
    total_steps: int
    progress: float
    """Fraction done, 0 to 1."""
    eta: float | None
    """Wall-clock seconds until the last step at the recent rate. Waiting for requests and other jobs is included,
    pauses are not. Updated at each step; null before the first and after the last one."""
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
    """Why the job failed, or why the daemon paused it: the engine died repeatedly (`engine_crashed`)."""
    result: str | None
    """`name@version` once succeeded: use it as `adapter` of `POST /generate`."""
    waiting: str | None = None
    """Why the job waits. `waiting for space`: all steps are done and the disk is full. `waiting for memory`, with the
    numbers: it is queued and does not fit next to the running jobs. Otherwise an earlier job of its adapter, whose
    version it continues (`on_conflict`), and whether that one is paused; or a daemon with another `--tp` or base."""
    rows_cut: int = 0
    """Rows that were truncated because they exceed `training.max_length`, the base's context or
    `micro_batch_tokens`."""
    auto: list[str] = []
    """Fields of `training` that the daemon chose from the sizes of the corpus and the base."""
    notes: list[str] = []
    """Notes for the user who submitted the job, such as that it replaces another version."""
    teacher: str | None = None
    samples: list[Sample] = []
    """Samples of the last step that has any, by prompt. The events have all samples."""
    stopped_early: bool = False
    """The job succeeded before `total_steps`, as `early_stopping_patience` evaluations brought no improvement."""
    document: DocumentJob | None = None
    test: EvalResult | None = None
    """Measures on the request's `test` rows, once there are some."""
    published_step: int | None = None
    """Step whose weights were published, once succeeded: with early stopping the step with the smallest validation loss
    (`metrics.best_valid_loss`), else the last one."""


class DeletedJob(Wire, frozen=True):
    """A deleted job. Its events are deleted too."""

    id: str
    adapter: str | None
    """null: the job's record was damaged."""
    result: str | None
    """The version that the job published; it stays."""


class Preparing(Wire, frozen=True):
    """Progress of tokenising a corpus, before its job exists."""

    adapter: str
    started_at: float
    rows: int
    """Rows tokenised so far."""
    progress: float
    """Fraction done, 0 to 1."""


class SubmissionEvent(Wire, frozen=True):
    """An event of `POST /finetune` with `Accept: text/event-stream`: progress of the corpus, then, as the last event,
    the job.

    A refusal is an event `error` with an `ErrorBody`, or an HTTP error if it comes before the first event.
    """

    preparing: Preparing | None = None
    job: Job | None = None


class JobList(Wire, frozen=True):
    """Jobs, newest first. The next page is `?after=<id of the last one>`."""

    data: list[Job]
    has_more: bool
    preparing: list[Preparing] = []
    """Large corpora that are being tokenised for future jobs, on the first page only."""


EventLevel = Literal["info", "warning", "error"]
EventType = Literal["state", "message", "metrics", "checkpoint", "sample", "document", "test"]


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
    """For `type: metrics`: `Job.eta` after this step."""
    sample: Sample | None = None
    """For `type: sample`."""
    document: DocumentJob | None = None
    """For `type: document`: the job's progress before and after its training."""
    test: EvalResult | None = None
    """For `type: test`."""
