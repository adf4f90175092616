"""Bounds of a workload's settings: generous for real runs, but every workload can be made in finite time and memory.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from coserve.core.errors import InvalidRequest
from coserve.core.limits import MAX_RANK, MAX_ROWS
from coserve.workloads.distributions import FIRST_ID

MAX_REQUESTS = 10_000_000
"""Maximum expected requests of a workload."""
MAX_TRAINING_ROWS = 20_000_000
"""Maximum fine-tuning rows of a workload, over all jobs."""
MAX_LENGTH = 1 << 20
"""Maximum tokens of a generated prompt or answer: coserve's own limit."""
MAX_SECONDS, MAX_RATE = 1e9, 1e6


class Bound(NamedTuple):
    """Lower and upper limit of a setting. `above`: the lower limit is exclusive."""

    least: float
    most: float
    above: bool = False

    def check(self, value: float, field: str) -> None:
        """Raise `InvalidRequest` if out of bounds, including NaN and infinity."""
        if self.above and not value > self.least:
            raise InvalidRequest(f"expected a number above {self.least:g}, got {value}", field=field)
        if not value >= self.least:
            raise InvalidRequest(f"expected at least {self.least:g}, got {value}", field=field)
        if value > self.most:
            raise InvalidRequest(f"expected at most {self.most:,.0f}, got {value}", field=field)


ARRIVALS = {
    "rate": Bound(1e-9, MAX_RATE),
    "cv": Bound(0.01, 100),
    "on_seconds": Bound(0.001, MAX_SECONDS),
    "off_seconds": Bound(0.001, MAX_SECONDS),
    "off_rate": Bound(0, MAX_RATE),
    "ramp_rate": Bound(0, MAX_RATE),
}
_SETTINGS = {
    **ARRIVALS,
    "duration": Bound(0.001, MAX_SECONDS),
    "lead": Bound(0, MAX_SECONDS),
    "adapters": Bound(0, 100_000),
    "rank": Bound(1, MAX_RANK),
    "exponent": Bound(0, 100),
    "vocab": Bound(FIRST_ID + 1, 1 << 24),
    "temperature": Bound(0, 100),
    "length_sigma": Bound(0, 10),
    "trace_start": Bound(0, 1e12),
    "trace_speed": Bound(1e-6, 1e6),
    "trace_rate": Bound(0, MAX_RATE, above=True),
    "finetune_period": Bound(0.001, MAX_SECONDS),
    "finetune_rows": Bound(0, MAX_ROWS),
    "finetune_jobs": Bound(0, 100_000),
    "row_tokens": Bound(1, 1 << 18),
    "steps": Bound(1, 1_000_000),
    "epochs": Bound(0, 1000, above=True),
    "batch_tokens": Bound(1, 1 << 40),
    "checkpoint_steps": Bound(1, 1 << 40),
    "max_total_tokens": Bound(1, 1 << 40),
    "learning_rate": Bound(0, 100, above=True),
    "batch_share": Bound(0, 1),
}
_LENGTHS = (
    "min_tokens",
    "max_tokens",
    "median_tokens",
    "min_prompt_tokens",
    "max_prompt_tokens",
    "median_prompt_tokens",
)
_LIMITS = ("slo_ttft", "slo_tpot", "slo_e2e", "slo_batch_ttft", "slo_batch_tpot", "slos")

SETTINGS: dict[str, Bound] = {
    **_SETTINGS,
    **dict.fromkeys(_LENGTHS, Bound(1, MAX_LENGTH)),
    **dict.fromkeys(_LIMITS, Bound(0, MAX_SECONDS, above=True)),
}
"""Bounds by the setting's name in `scenario.Scenario`; for a tuple they apply to each item."""


def check_bounds(values: Mapping[str, object], bounds: Mapping[str, Bound], prefix: str = "") -> None:
    """Raise `InvalidRequest` with the field, after `prefix`. None is not checked."""
    for name, bound in bounds.items():
        value = values[name]
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, int | float):
                bound.check(one, prefix + name)


def check_total(expected: float, most: int, things: str, field: str) -> None:
    """Raise `InvalidRequest` if a workload would have more than `most` of `things`."""
    if expected > most:
        raise InvalidRequest(f"expected at most {most:,} {things} in all, got {expected:,.0f}", field=field)
