"""The choice of a job's update rule."""

from __future__ import annotations

from collections.abc import Sequence

from coserve.core.training.settings import TrainingSettings
from coserve.finetune.update_rules.adamw import AdamW
from coserve.finetune.update_rules.eight_bit import EightBit
from coserve.finetune.update_rules.interface import UpdateRule, WeightRange
from coserve.finetune.update_rules.lion import Lion


def make_rule(ranges: Sequence[WeightRange], training: TrainingSettings) -> UpdateRule:
    if training.optimizer.eight_bit:
        return EightBit(ranges, training)
    return Lion(ranges, training) if training.optimizer.lion else AdamW(ranges, training)
