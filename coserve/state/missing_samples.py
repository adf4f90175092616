"""Notes that samples of a job are missing, by which it is known later that this was told."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from coserve.core.types import TrainingRequest

INTERRUPTED = "the job was interrupted during generation"


def without_samples(step: int, why: str, prompt: int | None = None) -> str:
    """The note. `prompt`: of one alone."""
    return _beginning(step, prompt) + why


def _beginning(step: int, prompt: int | None) -> str:
    return f"no samples at step {step}: " if prompt is None else f"no sample of prompt {prompt} at step {step}: "


def passed_step(training: TrainingRequest, step: int) -> int:
    """The last step with samples that a job at `step` has left behind; 0: none. Those of `step` itself it still
    generates."""
    return (step - 1) // training.sample_steps * training.sample_steps if training.sample_prompts and step else 0


def missing_notes(training: TrainingRequest, step: int, done: Collection[int], told: Iterable[str]) -> tuple[str, ...]:
    """Notes of the prompts that have no sample at `step`, which the job does not come back to, and for which none of
    the notes in `told` says so."""
    notes = tuple(told)

    def is_told(prompt: int | None) -> bool:
        return any(note.startswith(_beginning(step, prompt)) for note in notes)

    everyone = range(len(training.sample_prompts))
    missing = [] if is_told(None) else [prompt for prompt in everyone if prompt not in done and not is_told(prompt)]
    if len(missing) == len(everyone):
        return (without_samples(step, INTERRUPTED),)
    return tuple(without_samples(step, INTERRUPTED, prompt) for prompt in missing)
