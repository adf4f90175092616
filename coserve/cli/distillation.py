"""Distillation after a conversion: a job whose teacher is the source, on rows from here or on what the base
generates."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import typer

from coserve.client import Client, JobHandle
from coserve.core.errors import AdapterBusy, AdapterNotFound
from coserve.core.schemas import ConvertedAdapter, Job
from coserve.workloads.bundled import bundled_prompts

GENERATIONS = "generations"
"""The value of `--distill` that stands for no file."""
HELD_OUT = 0.1
"""Share of the rows on which the output error is measured."""
PATIENCE = 3
"""Measurements without improvement after which the training ends. The best weights are published, those before the
first step included."""
CHOICES, TOKENS, REQUESTS = 8, 64, 8
"""Continuations of each prompt, their most tokens, and how many prompts are continued at a time."""
LOSSLESS = 1e-6
"""A smaller error of a conversion is rounding."""

Rows = Path | list[dict[str, Any]]


def read_rows(client: Client, source: str) -> Rows:
    """The file that `source` names, or what the base makes of the bundled prompts. Raises `typer.BadParameter`."""
    if source == GENERATIONS:
        with ThreadPoolExecutor(REQUESTS) as pool:
            prompts = list(enumerate(bundled_prompts()))
            return [row for rows in pool.map(lambda numbered: _continued(client, *numbered), prompts) for row in rows]
    if not Path(source).is_file():
        raise typer.BadParameter(f"--distill: expected a JSONL file or {GENERATIONS!r}, got {source!r}")
    return Path(source)


def _continued(client: Client, number: int, prompt: str) -> list[dict[str, Any]]:
    """Rows of one prompt, sampled from the base."""
    answer = client.generate(prompt, n=CHOICES, max_tokens=TOKENS, seed=number * CHOICES)
    return [{"prompt": prompt, "completion": choice.text} for choice in answer.choices if choice.text.strip()]


def start_distillation(client: Client, converted: ConvertedAdapter, rows: Rows) -> JobHandle:
    """A job that trains the converted adapter on. Its teacher is the version that the adapter was made of."""
    made = converted.adapter
    return client.finetune(
        made.id,
        None if isinstance(rows, Path) else rows,
        file=rows if isinstance(rows, Path) else None,
        continue_from=made.ref,
        teacher=made.source.removeprefix("convert:"),
        training={"validation_split": HELD_OUT, "early_stopping_patience": PATIENCE},
    )


def output_errors(job: Job) -> tuple[float, float]:
    """Before a distillation, and of what it has published: the mean divergence from the teacher on the rows held out,
    in nats a token."""
    metrics = job.metrics
    assert metrics is not None and metrics.best_valid_loss is not None and metrics.valid_loss_before is not None, job
    return metrics.valid_loss_before, metrics.best_valid_loss


def result_lines(job: Job) -> list[str]:
    """What has come of it."""
    before, after = output_errors(job)
    lines = [f"{job.result}  output error {before:.4g} before, {after:.4g} after (nats a token, from {job.teacher})"]
    return lines if after < before else [*lines, f"no improvement: {job.result} has the weights of {job.continue_from}"]


def delete_unused(client: Client, refs: list[str]) -> list[str]:
    """Delete these versions, but for those that are in use; return which are deleted."""
    deleted = []
    for ref in refs:
        with contextlib.suppress(AdapterBusy, AdapterNotFound):
            client.delete_adapter(ref)
            deleted.append(ref)
    return deleted
