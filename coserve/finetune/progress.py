"""A job's training progress, saved in its checkpoints."""

from __future__ import annotations

from coserve.core.step_metrics import StepMetrics
from coserve.core.types import Wire


class TrainingProgress(Wire, frozen=True):
    """Progress after the last optimizer step. With the optimizer's state it makes up a checkpoint."""

    step: int = 0
    """Optimizer steps done."""
    trained_tokens: int = 0
    last_loss: float | None = None
    best_valid_loss: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    valid_loss_before: float | None = None
    """See `StepMetrics.valid_loss_before`."""
    pending: StepMetrics | None = None
    """Metrics of the last step while its evaluation is pending."""
