"""Pass/fail conditions on the results of a run, such as `slo>=0.99`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from coserve.core.errors import InvalidRequest
from coserve.workloads.metrics import Spread
from coserve.workloads.summary import Summary

_FORM = re.compile(r"\s*([a-z0-9_]+)\s*(>=|<=|>|<)\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(%|ms|s)?\s*")
_UNITS = {"": 1.0, "%": 0.01, "ms": 0.001, "s": 1.0}


def _latency(name: str, part: str, summary: Summary) -> float | None:
    values: Spread | None = getattr(summary, name)
    return None if values is None else float(getattr(values, part))


NUMBERS: dict[str, Callable[[Summary], float | None]] = {
    "slo": lambda summary: summary.attainment if summary.has_limits else None,
    "slo_worst": lambda summary: summary.worst_attainment if summary.has_limits else None,
    "slo_interactive": lambda summary: summary.class_attainment("interactive"),
    "slo_batch": lambda summary: summary.class_attainment("batch"),
    "satisfaction": lambda summary: summary.satisfaction if summary.requests else None,
    "goodput": lambda summary: summary.goodput if summary.has_limits else None,
    "errors": lambda summary: summary.requests - summary.completed if summary.requests else None,
    "shed": lambda summary: summary.shed if summary.requests else None,
    "requests_per_s": lambda summary: summary.request_throughput if summary.requests else None,
    "output_tok_s": lambda summary: summary.output_throughput if summary.requests else None,
    "finetune_tok_s": lambda summary: summary.finetune_window_throughput if summary.jobs else None,
    "finetune_share": lambda summary: summary.finetune_share if summary.jobs else None,
} | {
    f"{name}_{part}": partial(_latency, name, part)
    for name in ("ttft", "tpot", "itl", "e2e", "lag")
    for part in ("mean", "p50", "p90", "p95", "p99")
}
"""Values that conditions can name; None: not measured."""
SHARES = ("slo", "slo_worst", "slo_interactive", "slo_batch", "satisfaction")
"""Values that never exceed 1."""
COUNTS = ("errors", "shed")
"""Numbers of requests; with `%`, their fraction of all requests."""
LIMITED = ("slo", "slo_worst", "goodput")
"""Values that need latency limits."""


@dataclass(frozen=True)
class Condition:
    """A parsed condition. `text`: as the user wrote it. Times in seconds, fractions from 0 to 1."""

    text: str
    name: str
    relation: str
    bound: float
    of_requests: bool = False
    """Whether a count is compared as a fraction of all requests."""

    def value(self, summary: Summary) -> float | None:
        """Return the measured value; None: not measured."""
        value = NUMBERS[self.name](summary)
        return value / summary.requests if self.of_requests and value is not None else value

    def lacks(self, summary: Summary) -> str:
        """Return why the value was not measured, if a setting is missing."""
        if self.name in LIMITED and summary.requests and not summary.has_limits:
            return " without a limit such as --slo-ttft"
        return ""

    def holds(self, summary: Summary) -> bool:
        """Return whether the condition holds; False if the value was not measured."""
        value = self.value(summary)
        if value is None:
            return False
        match self.relation:
            case ">=":
                return value >= self.bound
            case "<=":
                return value <= self.bound
            case ">":
                return value > self.bound
            case _:
                return value < self.bound


def parse_condition(text: str) -> Condition:
    """Parse `NAME>=NUMBER`, also with `<=`, `>`, `<` and a unit: `slo>=99%`, `errors<=1%`, `ttft_p99<=250ms`. Raises
    `InvalidRequest`."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"expected a condition like slo>=0.99, got {text!r}", field="fail_under")
    name, relation, number, unit = found.groups(default="")
    if name not in NUMBERS:
        raise InvalidRequest(f"expected one of {', '.join(NUMBERS)}, got {name!r}", field="fail_under")
    units = _units_of(name)
    if unit and unit not in units:
        expected = f"a number with {' or '.join(units)}, or without a unit" if units else "a number without a unit"
        raise InvalidRequest(f"{name}: expected {expected}, got {text!r}", field="fail_under")
    bound = float(number) * _UNITS[unit]
    if name in SHARES and bound > 1:
        raise InvalidRequest(f"expected a share from 0 to 1, or such as 99%, got {text!r}", field="fail_under")
    return Condition(text.strip(), name, relation, bound, of_requests=unit == "%" and name in COUNTS)


def _units_of(name: str) -> tuple[str, ...]:
    if name in (*SHARES, *COUNTS, "finetune_share"):
        return ("%",)
    return ("ms", "s") if name.startswith(("ttft", "tpot", "itl", "e2e", "lag")) else ()
