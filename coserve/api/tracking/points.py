"""Data sent to a tracker about a job: its description, and the numbers of each optimizer step. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from coserve.core.schemas.jobs import JobEvent
from coserve.core.training.jobs import JobState
from coserve.core.training.step_metrics import StepMetrics
from coserve.lora.files.targets import with_alpha
from coserve.state.registry.records import JobRecord


class Run(msgspec.Struct, frozen=True):
    """A job as a tracker's run. `settings` are flat: `training.learning_rate`, `lora.r`, ..."""

    id: str
    name: str
    settings: dict[str, str | int | float | bool]


class Point(msgspec.Struct, frozen=True):
    """The numbers of one optimizer step. `time`: seconds since the epoch."""

    step: int
    time: float
    values: dict[str, float]


class Text(msgspec.Struct, frozen=True):
    """A sample that the adapter generated after an optimizer step, for one of the job's prompts. `time`: seconds since
    the epoch."""

    step: int
    time: float
    prompt: int
    text: str


def run_of(record: JobRecord) -> Run:
    spec = record.spec
    found: dict[str, str | int | float | bool] = {
        "adapter": spec.adapter,
        "version": spec.version,
        "continue_from": "" if spec.init_from is None else str(spec.init_from),
        "rows": spec.rows,
        "tokens": spec.tokens,
        "target_tokens": spec.target_tokens,
    }
    for group, settings in (
        ("lora", with_alpha(spec.lora)),
        ("training", spec.training),
        ("metadata", record.metadata),
    ):
        fields = msgspec.to_builtins(settings)
        assert isinstance(fields, dict)
        found |= {f"{group}.{name}": _plain(value) for name, value in fields.items()}
    return Run(spec.id, f"{spec.adapter}@{spec.version}", found)


def _plain(value: object) -> str | int | float | bool:
    if isinstance(value, str | int | float):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()


def values_of(metrics: StepMetrics) -> dict[str, float]:
    """Return the numbers by their names in transformers' Trainer and TRL's DPOTrainer. `train/tokens_per_second` is per
    second of the step's slices."""
    values = {
        "train/loss": metrics.loss,
        "train/learning_rate": metrics.learning_rate,
        "train/grad_norm": metrics.grad_norm,
        "train/epoch": metrics.epoch,
    }
    if metrics.seconds > 0:
        values["train/tokens_per_second"] = metrics.tokens / metrics.seconds
    measured = {
        "train/token_accuracy": metrics.token_accuracy,
        "train/perplexity": metrics.perplexity,
        "eval/loss": metrics.valid_loss,
        "eval/token_accuracy": metrics.valid_token_accuracy,
        "eval/perplexity": metrics.valid_perplexity,
    }
    for group, rewards in (("train", metrics.rewards), ("eval", metrics.valid_rewards)):
        if rewards is not None:
            values |= {
                f"{group}/rewards/chosen": rewards.chosen,
                f"{group}/rewards/rejected": rewards.rejected,
                f"{group}/rewards/margins": rewards.margin,
                f"{group}/rewards/accuracies": rewards.accuracy,
            }
    return values | {name: value for name, value in measured.items() if value is not None}


def points_of(events: Iterable[JobEvent], after: int) -> list[Point]:
    """Return the steps above `after`, each once: a job that resumed from a checkpoint repeats steps, with the same
    numbers."""
    found = []
    for event in events:
        if event.metrics is not None and event.metrics.step > after:
            after = event.metrics.step
            found.append(Point(after, event.created_at, values_of(event.metrics)))
    return found


def texts_of(events: Iterable[JobEvent]) -> list[Text]:
    return [
        Text(sample.step, event.created_at, sample.prompt, sample.text)
        for event in events
        if (sample := event.sample) is not None
    ]


def end_of(events: Iterable[JobEvent]) -> JobState | None:
    """Return the terminal state that `events` report, if any."""
    return next((event.state for event in events if event.state is not None and event.state.terminal), None)
