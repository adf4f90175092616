"""Shows the progress of one job on standard error, fed by the job's events: as a bar, or as lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

from coserve.core.schemas.jobs import Job, JobEvent, Sample
from coserve.core.training.step_metrics import StepMetrics

EVERY = 30.0
"""Seconds between two lines of progress without a terminal."""


class Silent(AbstractContextManager["Silent"]):
    """Shows nothing of a job's progress."""

    def __exit__(self, *error: object) -> None:
        pass

    def show(self, event: JobEvent) -> None:
        pass


class Lines(Silent):
    """Shows samples, phases of documents as they begin and, every `EVERY` seconds, the last step or how far the phase
    is, as plain lines. Used without a terminal."""

    def __init__(self, job: Job, now: Callable[[], float] = time.monotonic) -> None:
        self._name, self._now, self._next = f"{job.adapter}@{job.version}", now, now() + EVERY
        self._phase: str | None = None

    def show(self, event: JobEvent) -> None:
        if event.metrics is not None and self._now() >= self._next:
            self._next = self._now() + EVERY
            done = f"{event.metrics.step}/{event.metrics.total_steps}"
            print(f"{self._name}  step {done}  {step_text(event.metrics, event.eta)}", file=sys.stderr, flush=True)
        elif event.sample is not None:
            print("\n".join(sample_lines(event.sample)), file=sys.stderr, flush=True)
        elif event.document is not None:
            if event.document.phase != self._phase or self._now() >= self._next:
                self._phase, self._next = event.document.phase, self._now() + EVERY
                print(f"{self._name}  {event.message}", file=sys.stderr, flush=True)
        elif event.test is not None:
            print(f"{self._name}  {event.message}", file=sys.stderr, flush=True)


class Bar(Silent):
    """Shows a bar with steps, loss, accuracy (preference loss: rewards), tokens per second and time left; samples above
    it."""

    def __init__(self, job: Job) -> None:
        # Imported here, as a program without a bar need not load rich.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        name = f"{job.adapter}@{job.version}"
        self._task = self._bar.add_task(name, total=job.total_steps or None, completed=job.step, note=job.state.value)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, event: JobEvent) -> None:
        if event.metrics is not None:
            total, done = event.metrics.total_steps, event.metrics.step
            self._bar.update(self._task, total=total, completed=done, note=step_text(event.metrics, event.eta))
        elif event.sample is not None:
            for line in sample_lines(event.sample):
                self._bar.console.print(line, markup=False, highlight=False)
        elif event.document is not None:
            document = event.document
            self._bar.update(self._task, note=document.phase)
            if document.total:  # the phase `done` has no items
                self._bar.update(self._task, total=document.total, completed=document.done)
        elif event.state is not None:
            self._bar.update(self._task, note=event.state.value)


def step_text(metrics: StepMetrics, eta: float | None) -> str:
    """Return a text such as `loss 0.292  accuracy 98.3%  1,215 tokens/s  0:12 left`."""
    speed = metrics.tokens / metrics.seconds if metrics.seconds > 0 else 0.0
    parts = [f"loss {metrics.loss:.3f}", *learned_texts(metrics), f"{speed:,.0f} tokens/s"]
    return "  ".join(parts if eta is None else [*parts, f"{clock(eta)} left"])


def learned_texts(metrics: StepMetrics) -> list[str]:
    """Return `accuracy 98.3%` (of target tokens); for pairs `reward accuracy 75.0%` and `reward margin 2.04`."""
    if metrics.rewards is not None:
        return [f"reward accuracy {metrics.rewards.accuracy:.1%}", f"reward margin {metrics.rewards.margin:.3g}"]
    return [] if metrics.token_accuracy is None else [f"accuracy {metrics.token_accuracy:.1%}"]


def sample_lines(sample: Sample) -> list[str]:
    """Return a header and the sample's text, with control characters escaped."""
    text = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in sample.text)
    return [f"step {sample.step}, sample {sample.prompt}:", *(f"  {line}" for line in text.splitlines() or [""])]


def clock(seconds: float) -> str:
    """Return `1:05`, `2:00:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def progress_for(job: Job, wanted: bool | None) -> Silent:
    """Return the display for a job. `wanted` None: a bar if standard error is a terminal, otherwise lines."""
    if wanted or (wanted is None and sys.stderr.isatty()):
        return Bar(job)
    return Lines(job) if wanted is None else Silent()
