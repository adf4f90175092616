"""The progress of one job on standard error, fed by the job's events: a bar, or its samples as lines."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol, Self

from coserve.schemas import Job, JobEvent, Sample
from coserve.step_metrics import StepMetrics


class ProgressDisplay(Protocol):
    """Shows a job's progress."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, event: JobEvent) -> None: ...


class Silent:
    """No bar."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, event: JobEvent) -> None:
        pass


class SampleLines(Silent):
    """No bar, but samples as plain lines."""

    def show(self, event: JobEvent) -> None:
        if event.sample is not None:
            print("\n".join(sample_lines(event.sample)), file=sys.stderr, flush=True)


class Bar:
    """Steps, loss, what was learned of the target tokens or the pairs, tokens per second and the time left; samples above it."""

    def __init__(self, job: Job) -> None:
        # A program without a terminal, or without progress=True, need not load rich.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, event: JobEvent) -> None:
        if event.metrics is not None:
            metrics = event.metrics
            speed = metrics.tokens / metrics.seconds if metrics.seconds > 0 else 0.0
            learned = "".join(f"  {text}" for text in learned_texts(metrics))
            note = f"loss {metrics.loss:.3f}{learned}  {speed:,.0f} tokens/s"
            if event.eta is not None:
                note += f"  {clock(event.eta)} left"
            self._bar.update(self._task, total=metrics.total_steps, completed=metrics.step, note=note)
        elif event.sample is not None:
            for line in sample_lines(event.sample):
                self._bar.console.print(line, markup=False, highlight=False)
        elif event.state is not None:
            self._bar.update(self._task, note=event.state.value)


def learned_texts(metrics: StepMetrics) -> list[str]:
    """`accuracy 98.3%`, the share of the target tokens; of a DPO job instead `reward accuracy 75.0%` and `reward margin 2.04`."""
    if metrics.rewards is not None:
        return [f"reward accuracy {metrics.rewards.accuracy:.1%}", f"reward margin {metrics.rewards.margin:.3g}"]
    return [] if metrics.token_accuracy is None else [f"accuracy {metrics.token_accuracy:.1%}"]


def sample_lines(sample: Sample) -> list[str]:
    """A header, and the text, without characters that a terminal obeys."""
    text = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in sample.text)
    return [f"step {sample.step}, sample {sample.prompt}:", *(f"  {line}" for line in text.splitlines() or [""])]


def clock(seconds: float) -> str:
    """`1:05`, `2:00:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def progress_for(job: Job, wanted: bool | None) -> ProgressDisplay:
    """`wanted` None: a bar if standard error is a terminal, otherwise samples alone."""
    if wanted or (wanted is None and sys.stderr.isatty()):
        return Bar(job)
    return SampleLines() if wanted is None else Silent()
