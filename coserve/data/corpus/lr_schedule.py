"""Learning-rate schedules. Pure; no torch."""

from __future__ import annotations

import math

from coserve.core.training.settings import Schedule, TrainingSettings


def learning_rate(training: TrainingSettings, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up over `warmup_steps`, then the schedule, down to
    0."""
    peak, warmup = training.learning_rate, training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total_steps - warmup)
    match training.schedule:
        case Schedule.CONSTANT:
            return peak
        case Schedule.LINEAR:
            return peak * (1 - done)
        case Schedule.COSINE:
            return peak * 0.5 * (1 + math.cos(math.pi * done))
