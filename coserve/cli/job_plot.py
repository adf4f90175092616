"""`coserve jobs plot`: loss, learning rate and tokens per second of a job, as a figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from coserve.schemas import Job, JobEvent
from coserve.types import StepMetrics

INK = {"loss": "#2a6f97", "validation": "#bc4b51", "rate": "#e9a23b", "speed": "#2a9d8f"}


def collect_steps(job: Job, events: Iterable[JobEvent]) -> list[StepMetrics]:
    """The metrics of the steps that `job` has done, each once; of a step that ran twice, after a crash, the last.

    `events` may be live: they are read as far as the job's last step, or its end.
    """
    steps: dict[int, StepMetrics] = {}
    if job.step > 0:
        for event in events:
            if event.metrics is not None:
                steps[event.metrics.step] = event.metrics
            ended = event.state is not None and event.state.terminal
            if ended or (not job.state.terminal and event.metrics is not None and event.metrics.step >= job.step):
                break
    return [steps[step] for step in sorted(steps)]


def save_plot(path: Path, job: Job, steps: Sequence[StepMetrics]) -> None:
    """Three panels over the optimizer steps. `path` says the format by its suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate, speed = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    numbers = [step.step for step in steps]
    marker = "." if len(steps) == 1 else ""
    loss.plot(numbers, [step.loss for step in steps], color=INK["loss"], marker=marker, label="training")
    measured = [step for step in steps if step.valid_loss is not None]
    if measured:
        values = [step.valid_loss for step in measured]
        loss.plot([step.step for step in measured], values, "o-", color=INK["validation"], ms=4, label="validation")
        loss.legend(frameon=False)
    rate.plot(numbers, [step.learning_rate for step in steps], color=INK["rate"], marker=marker)
    timed = [step for step in steps if step.seconds > 0]
    speeds = [step.tokens / step.seconds for step in timed]
    speed.plot([step.step for step in timed], speeds, color=INK["speed"], marker=marker)
    loss.set_ylabel("loss" if job.teacher is None else "KL divergence")
    rate.set_ylabel("learning rate")
    speed.set(ylabel="tokens / s of training", xlabel="optimizer step", ylim=(0, None))
    for panel in (loss, rate, speed):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{job.adapter}@{job.version}  ({job.id}, {job.state}, step {job.step}/{job.total_steps})", fontsize=10
    )
    figure.savefig(path, dpi=120)
