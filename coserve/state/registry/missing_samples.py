"""Notes that samples of a job are missing; the registry reads them later to tell which it has already reported."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from coserve.core.training.settings import TrainingRequest

INTERRUPTED = "the job was interrupted during generation"


def without_samples(step: int, why: str, prompt: int | None = None) -> str:
    """Return the note that a step's samples are missing, or only that of prompt number `prompt`."""
    return _beginning(step, prompt) + why


def _beginning(step: int, prompt: int | None) -> str:
    return f"no samples at step {step}: " if prompt is None else f"no sample of prompt {prompt} at step {step}: "


def passed_step(training: TrainingRequest, step: int) -> int:
    """Return the last step with samples that a job at `step` has passed; 0: none. Samples of `step` itself can still
    come."""
    return (step - 1) // training.sample_steps * training.sample_steps if training.sample_prompts and step else 0


def missing_notes(training: TrainingRequest, step: int, done: Collection[int], told: Iterable[str]) -> tuple[str, ...]:
    """Return notes of the prompts without a sample at `step`, which the job has passed, unless a note in `told` says so
    already."""
    notes = tuple(told)

    def is_told(prompt: int | None) -> bool:
        return any(note.startswith(_beginning(step, prompt)) for note in notes)

    everyone = range(len(training.sample_prompts))
    missing = [] if is_told(None) else [prompt for prompt in everyone if prompt not in done and not is_told(prompt)]
    if len(missing) == len(everyone):
        return (without_samples(step, INTERRUPTED),)
    return tuple(without_samples(step, INTERRUPTED, prompt) for prompt in missing)
