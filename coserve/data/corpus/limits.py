"""Checks the size of a corpus, training settings and the lengths of rows and micro-batches. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from coserve.core.errors import InvalidRequest, MalformedRow
from coserve.core.limits import below_one
from coserve.core.messages import characters
from coserve.core.options import Bounds
from coserve.core.training.settings import DpoLoss, KtoLoss, PreferenceLoss, TrainingSettings
from coserve.core.validation import check_normal


@dataclass(frozen=True)
class CorpusLimits:
    """Largest accepted corpus: number of rows, and bytes of a row. `BatchPlan` takes some bytes of memory for each row;
    nothing else grows with the corpus."""

    rows: int = 10_000_000
    row_bytes: int = 16 << 20

    def check_line(self, line: int) -> None:
        """Raise `MalformedRow` if `line` (from 1) exceeds the largest number of rows."""
        if line > self.rows:
            raise MalformedRow(f"expected a corpus of at most {self.rows} rows", line=line)


LIMITS = CorpusLimits()
LEAST = {
    "batch_tokens": 1,
    "micro_batch_tokens": 2,
    "max_length": 2,
    "warmup_steps": 0,
    "validation_rows": 0,
    "max_grad_norm": 0,
    "weight_decay": 0,
    "lora_plus_ratio": 1,
    "early_stopping_patience": 1,
    "eval_steps": 1,
    "checkpoint_steps": 1,
    "seed": 0,
    "sample_steps": 1,
}
"""Least values of settings that must also be below 2^62."""
BOUNDS = {
    "steps": Bounds(1, 1_000_000),
    "epochs": Bounds(0, 1000, open=(True, False)),
    "learning_rate": Bounds(0, 100, open=(True, False)),
    "warmup_ratio": Bounds(0, 1),
    "eps": Bounds(0, 1, open=(True, False)),
    "neftune_alpha": Bounds(0, 1000, open=(True, False)),
    "sample_max_tokens": Bounds(1, 1024),
    "sample_temperature": Bounds(0, 100),
}
PREFERENCE_BOUNDS = {
    "beta": Bounds(0, 100, open=(True, False)),
    "label_smoothing": Bounds(0, 0.5, open=(False, True)),
    "sft_weight": Bounds(0, 100),
    "gamma": Bounds(0, 100),
    "discopop_tau": Bounds(0, 100, open=(True, False)),
    "desirable_weight": Bounds(0, 100),
    "undesirable_weight": Bounds(0, 100),
}
"""Settings of preference losses."""
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired")
"""Types of a DPO loss that have label smoothing."""
MAX_SAMPLE_PROMPTS = 8
MAX_SAMPLE_CHARACTERS = 8192
"""Characters of a prompt, or of all messages of a chat: the registry rewrites a job's prompts and samples at each
step."""


def check_training(training: TrainingSettings) -> None:
    """Raise `InvalidRequest`, with the field, for settings that are invalid for any corpus."""
    if training.epochs is not None and training.steps is not None:
        raise InvalidRequest("expected epochs or steps, got both", field="training.steps")
    for name, value in msgspec.structs.asdict(training).items():
        if isinstance(value, float):
            check_normal(value, field=f"training.{name}")
    for name, least in LEAST.items():
        value = getattr(training, name)
        if value is not None and not least <= value < 2**62:
            raise InvalidRequest(f"expected at least {least} and less than 2^62, got {value}", field=f"training.{name}")
    for name, bounds in BOUNDS.items():
        value = getattr(training, name)
        if value is not None and value not in bounds:
            raise InvalidRequest(f"expected {bounds}, got {value}", field=f"training.{name}")
    if training.warmup_ratio is not None and training.warmup_steps:
        raise InvalidRequest("expected warmup_steps or warmup_ratio, got both", field="training.warmup_ratio")
    if training.lora_plus_ratio is not None and training.learning_rate * training.lora_plus_ratio > 100:
        raise InvalidRequest(
            f"expected at most 100 as B's learning rate, got {training.learning_rate} times {training.lora_plus_ratio}",
            field="training.lora_plus_ratio",
        )
    for name in ("beta1", "beta2", "validation_split"):
        got = getattr(training, name)
        if not below_one(got):
            raise InvalidRequest(f"expected at least 0 and, in fp32, less than 1, got {got}", field=f"training.{name}")
    if training.optimizer.lion and training.eps != TrainingSettings().eps:
        raise InvalidRequest(f"expected no eps with {training.optimizer}, got {training.eps}", field="training.eps")
    if training.loss is not None:
        _check_loss(training.loss)
        if training.micro_batch_tokens is not None and training.micro_batch_tokens < 4:
            got = training.micro_batch_tokens
            raise InvalidRequest(
                f"expected at least 4 for two sequences, got {got}", field="training.micro_batch_tokens"
            )
        if training.train_on is not None:
            raise InvalidRequest(
                "expected no train_on: a preference loss is of the answers alone", field="training.train_on"
            )
        if training.one_row_per_answer:
            raise InvalidRequest(
                "expected it left out: a preference loss is of the answers alone", field="training.one_row_per_answer"
            )
    if training.one_row_per_answer and training.train_on == "all":
        raise InvalidRequest('expected train_on other than "all"', field="training.one_row_per_answer")
    if training.validation_rows and training.validation_split:
        raise InvalidRequest("expected no validation_rows beside a validation_split", field="training.validation_rows")
    if training.early_stopping_patience is not None and not training.held_back:
        raise InvalidRequest(
            "expected a validation_split or validation_rows above 0", field="training.early_stopping_patience"
        )
    _check_samples(training)


def _check_loss(loss: PreferenceLoss) -> None:
    for name, bounds in PREFERENCE_BOUNDS.items():
        value = getattr(loss, name, None)
        if value is not None:
            check_normal(value, field=f"training.loss.{name}")
            if value not in bounds:
                raise InvalidRequest(f"expected {bounds}, got {value}", field=f"training.loss.{name}")
    if isinstance(loss, KtoLoss) and not loss.desirable_weight and not loss.undesirable_weight:
        raise InvalidRequest("expected one of the weights above 0, got 0 and 0", field="training.loss.desirable_weight")
    if isinstance(loss, DpoLoss) and loss.label_smoothing and loss.loss_type not in SMOOTHED:
        raise InvalidRequest(
            f"expected 0 for the loss type {loss.loss_type}, got {loss.label_smoothing}: "
            f"only {', '.join(SMOOTHED)} have it",
            field="training.loss.label_smoothing",
        )


def _check_samples(training: TrainingSettings) -> None:
    if (count := len(training.sample_prompts)) > MAX_SAMPLE_PROMPTS:
        raise InvalidRequest(f"expected at most {MAX_SAMPLE_PROMPTS}, got {count}", field="training.sample_prompts")
    for prompt in training.sample_prompts:
        size = len(prompt) if isinstance(prompt, str) else characters(prompt)
        if size > MAX_SAMPLE_CHARACTERS:
            raise InvalidRequest(
                f"expected at most {MAX_SAMPLE_CHARACTERS} characters, got {size}", field="training.sample_prompts"
            )


def longest_row(training: TrainingSettings, context: int, micro_batch_tokens: int) -> int:
    """Return the most tokens of a row: the least of `max_length`, the base's context length and one micro-batch, which
    must hold both sequences of a pair.

    Raises `InvalidRequest` for a `max_length` above the context length.
    """
    if training.max_length is not None and training.max_length > context:
        raise InvalidRequest(
            f"expected at most the base's context of {context} tokens, got {training.max_length}",
            field="training.max_length",
        )
    limit = micro_batch_limit(training, micro_batch_tokens)
    return min(training.max_length or context, context, limit if training.loss is None else limit // 2)


def micro_batch_limit(training: TrainingSettings, micro_batch_tokens: int) -> int:
    """Return the most tokens of a micro-batch: what the job asks for, at most the engine's limit
    `micro_batch_tokens`."""
    return min(training.micro_batch_tokens or micro_batch_tokens, micro_batch_tokens)
