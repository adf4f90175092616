"""The kinds of micro-steps, the pieces in which training is run."""

from __future__ import annotations

from enum import StrEnum


class MicroStep(StrEnum):
    """Kinds of micro-steps. A micro-step is a piece of a training micro-batch that runs without interruption. Within a
    job, micro-steps of one kind take about the same time."""

    BEGIN = "begin"
    """Pack and embed rows, and run the first layer's forward. Several GPUs also compute DoRA's scales, until weights
    that were loaded are updated."""
    FORWARD = "forward"
    """One layer's forward."""
    HEAD = "head"
    """Logits, loss and its gradient, for a chunk of the target tokens."""
    BACKWARD = "backward"
    """One layer's backward."""
    OPTIMIZER = "optimizer"
    """The update of the weights, one micro-step per optimizer step; with paged moments one per
    `admission.optimizers.SLICE` of it, and with DoRA one more per `finetune.dora_scales.SITES_AT_ONCE` sites."""
    EVALUATE = "evaluate"
    """One layer's forward without gradients, for an evaluation, a teacher or a reference."""
    EVALUATE_HEAD = "evaluate_head"
    RESULT = "result"
    """The host reads the results of earlier micro-steps and continues with them. Used only if slices overlap
    generation; otherwise the preceding micro-step does it."""
