"""Errors of predicted step times, from the composition against a running median by kind, and what a prediction costs.

    python -m benchmarks.scheduling.step_prediction --out benchmarks/results

Simulated steps, about those of an 8B model: the batch grows and shrinks between 1 and 64 sequences, every fourth step
has prompts of up to 1,024 tokens, errors are normal (3%), one step in 100 takes ten times as long, and from the middle
on all take 1.5 times as long. Needs no GPU. Errors are of steps that are no outliers, in percent of the step's true
time.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from statistics import median

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results
from benchmarks.scheduling.slack_risk import step_seconds
from coserve.queues.costs import WINDOW, Predictors
from coserve.queues.shapes import STEP_FEATURES, STEP_KINDS, StepKind, StepShape

STEPS = 4000


def steps() -> Iterator[tuple[StepShape, float, float]]:
    """Shapes, true and measured seconds; NaN for outliers' true ones."""
    rng = random.Random(0)
    for number in range(STEPS):
        decodes = 1 + round(63 * (0.5 - 0.5 * math.cos(number / 150)))
        shape = StepShape(decodes, decodes * rng.randint(200, 600))
        if number % 4 == 0:
            shape = shape.and_prompt(rng.randint(16, 1024))
        true = step_seconds(shape) * (1.5 if number > STEPS // 2 else 1.0)
        outlier = rng.random() < 0.01
        yield shape, math.nan if outlier else true, true * (10.0 if outlier else rng.gauss(1.0, 0.03))


def main() -> None:
    options = make_parser(__doc__).parse_args()
    results = Results.of(
        options,
        "step_prediction.json",
        script="benchmarks.scheduling.step_prediction",
        hardware=cpu_name(),
        seed=0,
        settings={"steps": STEPS},
    )
    predictors, recent = Predictors(STEP_FEATURES), defaultdict[StepKind, deque[float]](lambda: deque(maxlen=WINDOW))
    errors = {way: defaultdict[StepKind, list[float]](list) for way in ("composition", "median")}
    costs: dict[str, list[float]] = {"predict": [], "learn": []}
    kept = counted = 0
    for shape, true, measured in steps():
        began = time.perf_counter()
        found = predictors.predict(shape.features, shape.kind, *STEP_KINDS)
        costs["predict"].append(time.perf_counter() - began)
        if len(recent[shape.kind]) == WINDOW and not math.isnan(true):
            errors["composition"][shape.kind].append(abs(found.expected / true - 1))
            errors["median"][shape.kind].append(abs(median(recent[shape.kind]) / true - 1))
            kept += measured <= found.most
            counted += 1
        recent[shape.kind].append(measured)
        began = time.perf_counter()
        predictors.add(shape.kind, shape.features, measured)
        costs["learn"].append(time.perf_counter() - began)
    for way, by_kind in errors.items():
        for kind, values in by_kind.items():
            values.sort()
            for share in (50, 99):
                value = 100 * values[len(values) * share // 100]
                results.put(f"step_prediction.{way}.{kind}.p{share}", round(value, 1), "% of the step's time")
    results.put("step_prediction.kept", round(kept / counted, 4), "share of steps within the time that is counted on")
    for name, seconds in costs.items():
        results.put(f"step_prediction.{name}_us", round(1e6 * median(seconds), 1), "us, median")


if __name__ == "__main__":
    main()
