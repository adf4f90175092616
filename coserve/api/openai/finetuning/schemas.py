"""Bodies of `/v1/fine_tuning/jobs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from coserve.api.http.body_types import Unsupported
from coserve.api.openai.lists import ListPage
from coserve.api.openai.schemas import ModelName
from coserve.core.training.settings import Auto
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import LoraRequest, Wire

BatchSize = Annotated[int, Meta(ge=1, le=1 << 20)]
Multiplier = Annotated[float, Meta(gt=0, le=1e6)]
Epochs = Annotated[int, Meta(ge=1, le=1000)]
FileId = Annotated[str, Meta(min_length=1, max_length=128)]


class Hyperparameters(Wire, frozen=True):
    """Values that are left out, null or `auto` are chosen by the daemon."""

    batch_size: BatchSize | Auto | None = None
    """Mean number of rows per optimizer step; it becomes the job's `training.batch_tokens`."""
    learning_rate_multiplier: Multiplier | Auto | None = None
    """Multiple of the learning rate that the daemon chooses."""
    n_epochs: Epochs | Auto | None = None


class DpoHyperparameters(Hyperparameters, frozen=True):
    beta: Annotated[float, Meta(gt=0, le=100)] | Auto | None = None
    """`auto`: 0.1."""


class Supervised(Wire, frozen=True):
    hyperparameters: Hyperparameters | None = None


class Dpo(Wire, frozen=True):
    hyperparameters: DpoHyperparameters | None = None


class Method(Wire, frozen=True):
    """How to learn; the settings are in the field of the type's name."""

    type: Literal["supervised", "dpo"]
    supervised: Supervised | None = None
    dpo: Dpo | None = None


class CreateJob(Wire, frozen=True):
    """Body of `POST /v1/fine_tuning/jobs`. The response comes once the whole training file is tokenised, so that it
    reports an error in any row. A header `Idempotency-Key` makes the request safe to repeat."""

    model: ModelName
    """The base, or an adapter to continue: its own version stays as it is."""
    training_file: FileId
    """Id of a file of rows, as in OpenAI's API or in any format of `POST /finetune`."""
    validation_file: FileId | None = None
    """Id of a file of rows to measure the loss on. Both files must then be JSON Lines."""
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    """Hyperparameters of the method `supervised`, in the place where older clients put them."""
    suffix: Annotated[str, Meta(max_length=64)] | None = None
    """Part of the name of the fine-tuned model. Its first 52 characters are kept; those that no adapter's name may have
    become `-`."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 62) - 1)] | None = None
    """null: a random one."""
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    integrations: Annotated[Any, Unsupported()] = None
    """Refused unless empty: `--tracker` sends the metrics of all jobs."""
    lora: LoraRequest | None = None
    """coserve's own: the shape of a new adapter, as in `POST /finetune`."""


class JobError(Wire, frozen=True):
    code: str
    message: str
    param: str | None


class FineTuningJob(Wire, frozen=True, kw_only=True):
    """A fine-tuning job in OpenAI's format; `GET /finetune/{id}` shows the same job."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    """Null unless the job runs and has done a step."""
    model: str
    """The base, or the adapter that the job continues."""
    fine_tuned_model: str | None
    """The model's name once the job has succeeded. For a job of `POST /finetune`: `name@version`."""
    organization_id: str
    status: Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
    trained_tokens: int | None
    """Null until the job has ended."""
    training_file: str
    """Empty for a job of `POST /finetune`."""
    validation_file: str | None
    result_files: list[str] = []
    """Once the job has succeeded, a CSV file of its steps' losses and accuracies. It goes with the job."""
    seed: int
    method: Method | None
    """The method, with the values that the daemon chose; None: a loss that OpenAI lacks (ORPO, SimPO)."""
    hyperparameters: Hyperparameters
    metadata: dict[str, str]
    integrations: list[str] = []
    error: JobError | None


class FineTuningJobList(Wire, frozen=True, kw_only=True):
    """Jobs, newest first. The next page is `?after=<id of the last one>`."""

    object: Literal["list"] = "list"
    data: list[FineTuningJob]
    has_more: bool


Level = Literal["info", "warn", "error"]


class FineTuningEvent(Wire, frozen=True, kw_only=True):
    """An event of a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Level
    message: str
    type: Literal["message", "metrics"]
    data: StepMetrics | None = None
    """Metrics of an optimizer step, for `type: metrics`."""


class FineTuningEventList(Wire, frozen=True, kw_only=True):
    """Events, newest first. The next page is `?after=<id of the last one>`."""

    object: Literal["list"] = "list"
    data: list[FineTuningEvent]
    has_more: bool


class CheckpointMetrics(Wire, frozen=True):
    step: int
    train_loss: float | UnsetType = UNSET
    train_mean_token_accuracy: float | UnsetType = UNSET
    full_valid_loss: float | UnsetType = UNSET
    full_valid_mean_token_accuracy: float | UnsetType = UNSET


class Checkpoint(Wire, frozen=True, kw_only=True):
    """Weights that a job published, which requests can use."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: CheckpointMetrics


class CheckpointList(ListPage[Checkpoint], frozen=True, kw_only=True):
    """The checkpoints of a job that can be served: one once it has succeeded, none before."""
