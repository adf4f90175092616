"""Draws the figure of `coserve jobs plot`: a job's loss, token accuracy (preference loss: rewards), learning rate and
tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coserve.core.schemas.jobs import Job, JobEvent
from coserve.core.training.step_metrics import Rewards, StepMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = {"loss": "#2a6f97", "validation": "#bc4b51", "rate": "#e9a23b", "speed": "#2a9d8f", "published": "#6c757d"}
Values = tuple[int, float | None, float | None]
"""Step, value in training, value in validation."""


def collect_steps(job: Job, events: Iterable[JobEvent]) -> list[StepMetrics]:
    """Return the metrics of the job's completed steps, each once. For a step that ran twice, after a crash, the later
    metrics count.

    `events` may be live: they are read up to the job's last step, or its end.
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
    """Draw panels over the optimizer steps and save them. The suffix of `path` selects the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    learned = learned_curves(steps)
    heights = (2, *(1 for _ in learned), 1, 1)
    figure = Figure(figsize=(8, 1.5 + 1.5 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    loss, rate, speed = panels[0], panels[-2], panels[-1]
    marker = "." if len(steps) == 1 else ""
    _curves(loss, [(step.step, step.loss, step.valid_loss) for step in steps], marker)
    for panel, (label, values) in zip(panels[1:], learned.items(), strict=False):
        _curves(panel, values, marker)
        panel.set(ylabel=label, **({"ylim": (0, 1.02)} if "accuracy" in label else {}))
    numbers = [step.step for step in steps]
    rate.plot(numbers, [step.learning_rate for step in steps], color=INK["rate"], marker=marker)
    timed = [step for step in steps if step.seconds > 0]
    speeds = [step.tokens / step.seconds for step in timed]
    speed.plot([step.step for step in timed], speeds, color=INK["speed"], marker=marker)
    if job.published_step is not None and job.published_step != job.step:
        for panel in panels:
            panel.axvline(job.published_step, color=INK["published"], linestyle="--", linewidth=1)
    own = "loss" if job.training.loss is None else "preference loss"
    loss.set_ylabel(own if job.teacher is None else "KL divergence")
    rate.set_ylabel("learning rate")
    speed.set(ylabel="tokens / s of training", xlabel="optimizer step", ylim=(0, None))
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(plot_title(job), fontsize=10)
    figure.savefig(path, dpi=120)


def plot_title(job: Job) -> str:
    """Return a title with the job, its progress, and the published step if that is not the last one."""
    parts = [job.id, job.state.value, f"step {job.step}/{job.total_steps}"]
    parts += ["stopped early"] if job.stopped_early else []
    if job.published_step is not None and job.published_step != job.step:
        parts.append(f"step {job.published_step} published (dashed)")
    return f"{job.adapter}@{job.version}  ({', '.join(parts)})"


def learned_curves(steps: Sequence[StepMetrics]) -> dict[str, list[Values]]:
    """Return the curves by label: rewards of pairs, else token accuracy. Curves without values are left out."""
    if any(step.rewards is not None for step in steps):

        def of_pairs(value: Callable[[Rewards], float]) -> list[Values]:
            both = [(step.step, step.rewards, step.valid_rewards) for step in steps]
            return [(n, None if own is None else value(own), None if v is None else value(v)) for n, own, v in both]

        return {
            "reward margin": of_pairs(lambda rewards: rewards.margin),
            "reward accuracy": of_pairs(lambda rewards: rewards.accuracy),
        }
    if any(step.token_accuracy is not None for step in steps):
        return {"token accuracy": [(step.step, step.token_accuracy, step.valid_token_accuracy) for step in steps]}
    return {}


def _curves(panel: Axes, values: Sequence[Values], marker: str) -> None:
    training = [(step, value) for step, value, _ in values if value is not None]
    panel.plot(*zip(*training, strict=True), color=INK["loss"], marker=marker, label="training")
    if measured := [(step, value) for step, _, value in values if value is not None]:
        panel.plot(*zip(*measured, strict=True), "o-", color=INK["validation"], ms=4, label="validation")
        panel.legend(frameon=False)
