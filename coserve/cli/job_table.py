"""Formats jobs as lines of text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from coserve.client.options import cut_warning
from coserve.client.progress import clock, learned_texts
from coserve.core.schemas.documents import DocumentJob
from coserve.core.schemas.jobs import EvalScore, Job, Preparing

HEADERS = ("ID", "ADAPTER", "STATE", "STEP", "LOSS", "AGE", "LEFT")
LEAST_NAME = 8
"""Minimum characters of an adapter's name on a narrow terminal."""


def age(seconds: float) -> str:
    """Return a duration in the largest unit that fits: `5s`, `12m`, `3h`, `9d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def job_table(
    jobs: Sequence[Job], now: float | None = None, *, notes: bool = False, width: int | None = None
) -> Iterator[str]:
    """Yield a header, then one line per job, in columns; with `notes`, a job's notes below it. `width`: characters per
    line, to which long adapter names are shortened."""
    now = time.time() if now is None else now
    rows = [HEADERS, *(_cells(job, now) for job in jobs)]
    lines = columns(rows)
    if width is not None and (over := max(map(len, columns(rows))) - width) > 0:
        longest = max(max(len(row[1]) for row in rows) - over, LEAST_NAME)
        lines = columns([(row[0], _cut(row[1], longest), *row[2:]) for row in rows])
    yield next(lines)
    for line, job in zip(lines, jobs, strict=True):
        yield line
        yield from (f"    {note}" for note in job_notes(job) if notes)


def _cut(text: str, length: int) -> str:
    """Shorten a text in its middle, since an adapter's version is at the end."""
    if len(text) <= length:
        return text
    end = text[text.rindex("@") :]
    return f"{text[: max(0, length - len(end) - 1)]}…{end}"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a line for each row, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cells(job: Job, now: float) -> tuple[str, ...]:
    step = f"{job.step}/{job.total_steps}"
    if job.document is not None and job.document.total:
        step = document_text(job.document)
    return (
        job.id,
        f"{job.adapter}@{job.version}",
        job.state.value,
        step,
        "-" if job.loss is None else f"{job.loss:.3f}",
        age(now - job.created_at),
        "-" if job.eta is None else clock(job.eta),
    )


def job_notes(job: Job) -> list[str]:
    """Return why the job failed or waits, how many are before it, which tokens it learned, and the daemon's notes."""
    notes = [] if job.error is None else [f"{job.error.code}: {job.error.message}"]
    notes += [] if job.waiting is None else [job.waiting]
    notes += [] if job.queue_position is None else [f"{job.queue_position} ahead"]
    notes += [f"stopped early, step {job.published_step} published"] if job.stopped_early else []
    notes += [f"{_count(job.rows_cut, 'row')} cut"] if job.rows_cut else []
    return [*notes, *job.notes]


def job_line(job: Job) -> str:
    """Return one job as a line without a header."""
    loss = "" if job.loss is None else f"  loss {job.loss:.3f}"
    if job.metrics is not None:
        loss += "" if job.metrics.valid_loss is None else f"  validation loss {job.metrics.valid_loss:.3f}"
        loss += _best(job)
        loss += "" if job.metrics.perplexity is None else f"  perplexity {job.metrics.perplexity:.4g}"
        loss += "".join(f"  {text}" for text in learned_texts(job.metrics))
    loss += "" if job.test is None else f"  test {_measures(job.test.adapter)} (base {_measures(job.test.base)})"
    loss += "" if job.document is None else f"  {document_text(job.document)}"
    error = "" if job.error is None else f"  {job.error.code}: {job.error.message}"
    waiting = "" if job.waiting is None else f"  {job.waiting}"
    step = f"step {job.step}/{job.total_steps}{', stopped early' if job.stopped_early else ''}"
    return f"{job.id}  {job.adapter}@{job.version}  {job.state}  {step}{loss}{waiting}{error}"


def _measures(score: EvalScore) -> str:
    match = "" if score.match is None else f", {score.match:.0%} of answers right"
    return f"loss {score.loss:.3f}, {score.token_accuracy:.0%} of tokens right{match}"


def document_text(document: DocumentJob) -> str:
    """Return a document's phase; once it is evaluated, its losses without the text, with it in the prompt and by the
    adapter."""
    found = document.evaluation
    if found is None:
        return f"{document.phase} {document.done}/{document.total}" if document.total else document.phase
    recovered = "" if found.recovered is None else f"  recovered {found.recovered:.0%}"
    return "  ".join(found.losses) + recovered


def _best(job: Job) -> str:
    """Return, with early stopping, the step that is published or would be now; else an empty text."""
    metrics = job.metrics
    if metrics is None or metrics.best_step is None or metrics.best_valid_loss is None:
        return ""
    what = "best" if job.published_step is None else "published"
    return f" ({what}: {metrics.best_valid_loss:.3f} of step {metrics.best_step})"


def preparing_line(preparing: Preparing) -> str:
    """Return a line for a corpus that is being tokenised, before its job exists."""
    rows = _count(preparing.rows, "row")
    return f"preparing {preparing.adapter}: {rows} tokenised ({preparing.progress:.0%})"


def chosen_line(job: Job) -> str | None:
    """Return a line with the training settings that the daemon chose; None if there are none."""
    training, parts = job.training, []
    if "epochs" in job.auto and training.epochs is not None:
        parts.append(f"{training.epochs:g} epochs")
    if "batch_tokens" in job.auto:
        parts.append(f"batches of {training.batch_tokens} tokens")
    if "learning_rate" in job.auto:
        parts.append(f"learning rate {training.learning_rate:g}")
    return f"chosen for {_count(job.rows, 'row')} of {job.tokens} tokens: {', '.join(parts)}" if parts else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def cut_line(job: Job) -> str | None:
    """Return a warning about truncated rows, if there are any."""
    warning = cut_warning(job)
    return None if warning is None else f"warning: {warning}"
