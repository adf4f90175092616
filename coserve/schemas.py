"""Requests and responses of the HTTP API: checked by the server, built by the SDK, described by `/openapi.json`.

No torch, no IO. Times are seconds since the epoch (`*_at`) or seconds (`eta`, `timing`, `slo_*`); sizes are bytes or tokens. A
streamed generation is a sequence of server-sent events `data: GenerateChunk`, then `data: [DONE]`; a failure after the first
byte is `event: error` with an `ErrorBody`. `slo_e2e` counts from arrival to the last of `max_tokens`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from coserve.limits import (
    MAX_BLOCKS,
    MAX_MESSAGES,
    MAX_RANK,
    MAX_ROWS,
    AuthorName,
    CacheSalt,
    Choices,
    LocalPath,
    LogitBias,
    LogprobCount,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seconds,
    Seed,
    StopText,
    StopTexts,
    StopTokenIds,
    Temperature,
    TokenCount,
    TokenId,
    TopK,
    TopP,
)
from coserve.names import MAX_VERSION, AdapterName, AdapterRefText
from coserve.types import JobState, LoraSettings, StepMetrics, TrainingRequest, TrainingSettings, Wire


class ChatMessage(Wire, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: AuthorName | None = None


class GenerateRequest(Wire, frozen=True, omit_defaults=True):
    """`POST /generate`. Exactly one of `prompt` (text or token ids) and `messages`."""

    prompt: str | list[TokenId] | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    adapter: AdapterRefText | None = None
    """None: the base itself."""
    stream: bool = False
    n: Choices = 1
    """Choices to generate; choice i uses `seed + i`."""
    max_tokens: TokenCount | None = 128
    """At most the base's context; generation ends where the context does. None: as many as fit; 0, with
    `prompt_logprobs`: nothing is generated."""
    min_tokens: TokenCount = 0
    temperature: Temperature = 1.0
    """0: always the likeliest token."""
    top_k: TopK = 0
    """0: off."""
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: StopText | StopTexts | None = None
    """Texts that end the choice. They are not part of its text."""
    include_stop_str_in_output: bool = False
    """The stop string is part of the text."""
    stop_token_ids: StopTokenIds = []
    ignore_eos: bool = False
    logit_bias: LogitBias = {}
    logprobs: LogprobCount | None = None
    """Log-probability of each token and of so many likeliest ones; None: none."""
    prompt_logprobs: LogprobCount | None = None
    """The same for the prompt's tokens."""
    return_prompt_ids: bool = False
    skip_special_tokens: bool = True
    """Special tokens are not part of the text."""
    seed: Seed | None = None
    """None: a random one, which the response repeats."""
    cache_salt: CacheSalt = ""
    """Only requests with the same salt share prefixes in the cache."""
    slo_ttft: Seconds | None = None
    slo_tpot: Seconds | None = None
    slo_e2e: Seconds | None = None


class Logprob(Wire, frozen=True):
    """A token, its text on its own, and its natural-log probability."""

    token_id: int
    token: str
    logprob: float


class ChosenLogprob(Wire, frozen=True):
    """The chosen token and the likeliest ones in its place."""

    token_id: int
    token: str
    logprob: float
    top: list[Logprob] = []


class PromptLogprob(Wire, frozen=True):
    """A token of the prompt; `logprob` is null for the first one, which follows nothing."""

    token_id: int
    token: str
    logprob: float | None
    top: list[Logprob] = []


Finish = Literal["stop", "length", "cancelled"]
"""Values of `FinishReason`."""


class Choice(Wire, frozen=True):
    """One continuation. `stop_reason` is the stop text or the stop token id that ended it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Finish
    stop_reason: str | int | None = None
    logprobs: list[ChosenLogprob] | None = None


class Usage(Wire, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timing(Wire, frozen=True):
    """Seconds from the request's arrival: until it was admitted, until its first token, until its end."""

    queue: float | None
    ttft: float
    e2e: float


class GenerateResponse(Wire, frozen=True):
    """The response of `POST /generate` without `stream`. `adapter` and `version` are null for the base."""

    id: str
    adapter: str | None
    version: int | None
    seed: int
    choices: list[Choice]
    usage: Usage
    timing: Timing
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[PromptLogprob] | None = None


class GenerateChunk(Wire, frozen=True):
    """One event of a stream: the new text and tokens of choice `index`.

    The last chunk of a choice has `finish_reason`; the last chunk of all has `usage` and `timing` too. Prompt ids
    and prompt log-probabilities come with the first chunks of choice 0, before its first token.
    """

    id: str
    adapter: str | None
    version: int | None
    seed: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    logprobs: list[ChosenLogprob] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    usage: Usage | None = None
    timing: Timing | None = None


ROWS = """Rows, each of one of these formats (docs/data.md says how each is rendered and what of it is learned):
`{"text": "..."}`;
`{"prompt": "...", "completion": "..."}`;
`{"messages": [{"role": "system|user|assistant|tool", "content": "...", "weight": 0 or 1, of the assistant's alone}]}`;
`{"instruction": "...", "input": "...", "output": "..."}` (alpaca; `input` may be left out);
`{"conversations": [{"from": "human|gpt|system|tool", "value": "..."}]}` (ShareGPT)."""


class FinetuneRequest(Wire, frozen=True, omit_defaults=True):
    """`POST /finetune`: as a JSON body with `data` or `path`, or as multipart/form-data with a part `settings` (this, as
    JSON, without both) and then a part `file` (JSONL). A header `Idempotency-Key` makes the request safe to repeat.
    """

    adapter: AdapterName
    data: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ROWS, description=ROWS)] | None = None
    path: LocalPath | None = None
    """A JSONL file under the daemon's `data_root`."""
    continue_from: AdapterRefText | None = None
    """Go on from this adapter instead of a new one; then `lora` must be left out."""
    teacher: AdapterRefText | None = None
    """Distillation: learn this adapter's outputs at the rows' targets, not their tokens. Losses are then KL divergences from it."""
    lora: LoraSettings | None = None
    training: TrainingRequest = TrainingRequest()
    metadata: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
    ] = {}


class ErrorInfo(Wire, frozen=True):
    """`field` names what of the request is wrong; `line` the row of a corpus."""

    code: str
    message: str
    field: str | None = None
    line: int | UnsetType = UNSET


class ErrorBody(Wire, frozen=True):
    """The body of every response that is not 2xx."""

    error: ErrorInfo


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
    """Seconds of training left at the speed of the last step; null before the first one and at the end."""
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
    result: str | None
    """`name@version` once succeeded: use it as `adapter` of `POST /generate`."""
    waiting: str | None = None
    """What a running job waits for: `waiting for space` once all its steps are done and the disk is full."""
    rows_cut: int = 0
    """Rows that lost a part: they were longer than `training.max_length`, the base's context or `micro_batch_tokens`."""
    auto: list[str] = []
    """The fields of `training` that the daemon chose from the size of the corpus and of the base."""
    notes: list[str] = []
    """Notes for the user who submitted the job, such as that it replaces another version."""
    teacher: str | None = None


class JobList(Wire, frozen=True):
    """Newest first; the next page is `?after=<id of the last one>`."""

    data: list[Job]
    has_more: bool


EventLevel = Literal["info", "warning", "error"]
EventType = Literal["state", "message", "metrics", "checkpoint"]


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


class ImportRequest(Wire, frozen=True, omit_defaults=True):
    """`POST /adapters`: as a JSON body with `path`, or as multipart/form-data with a part `settings` (this, as JSON,
    without `path`) and then one part `file` for each of adapter_config.json and adapter_model.safetensors.
    """

    name: AdapterName
    path: LocalPath | None = None
    """A folder under the daemon's `data_root`."""


class Adapter(Wire, frozen=True):
    """One version of an adapter."""

    id: str
    version: int
    ref: str
    """`id@version`."""
    rank: int
    """The largest, where ranks differ between sites; over all blocks, with BD-LoRA."""
    alpha: float
    targets: list[str]
    base: str
    base_fingerprint: str
    source: str
    """`job:<id>`, `import` or `convert:<name@version>`."""
    created_at: float
    bytes: int
    sha256: str
    resident: bool
    """In memory now."""
    versions: list[int] | None = None
    """All versions, ascending; null in lists."""
    current: bool = True
    """The name without a version means this one."""
    bd_blocks: int = 1
    """Diagonal blocks of a BD-LoRA adapter; 1: plain LoRA."""


class RollbackRequest(Wire, frozen=True):
    """`POST /adapters/{id}/rollback`: the name means this version until a newer one is published."""

    version: Annotated[int, Meta(ge=1, le=MAX_VERSION)]


class ConvertRequest(Wire, frozen=True, omit_defaults=True):
    """`POST /adapters/{id}/convert`: from LoRA to BD-LoRA, back, to other blocks or to another rank, by truncated SVD."""

    bd_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    """Diagonal blocks of the new adapter; 1: plain LoRA."""
    rank: Annotated[int, Meta(ge=1, le=MAX_RANK)] | None = None
    """Of all blocks together. None: the smallest one whose error is at most `max_error`."""
    max_error: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Bound of the error; with `rank` too, a larger error is refused. None: 0.05, and no bound for `rank`."""
    name: AdapterName | None = None
    """Of the new adapter. None: `<name>-bd<bd_blocks>`, or `<name>-lora` for one block."""


class ConvertedAdapter(Wire, frozen=True):
    """An error is the Frobenius norm of what the update (B times A) lost, divided by that of the whole update."""

    adapter: Adapter
    rank: int
    error: float
    """Of all sites together."""
    site_errors: dict[str, float]
    max_error: float
    smallest_rank: int
    """The smallest rank whose error is at most `max_error`."""
    errors: dict[int, float]
    """The error of all sites at other ranks."""


class AdapterList(Wire, frozen=True):
    """The version that each name means, by name; the next page is `?after=<id of the last one>`."""

    data: list[Adapter]
    has_more: bool


class DeletedAdapter(Wire, frozen=True):
    id: str
    versions: list[int]
    current_ref: str | None = None
    """The version that the name means from now on (`"pirate@1"`); None: no version is left."""


class Pointers(Wire, frozen=True):
    """The response of `GET /`: where to look."""

    version: str
    docs: dict[str, str]
    """Pages in the project's repository, and what they are about."""
    name: str = "coserve"
    health: str = "/health"
    openapi: str = "/openapi.json"


STREAM_END = "[DONE]"
