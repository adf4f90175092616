"""Draws what the planner predicts, and what the daemon's scheduler did: `docs/figures/plan_admission.png`.

    python -m benchmarks.moe.plan_figure            # of the committed plan_error.json; no GPU, some seconds

Left: the share of requests that are admitted at once, by room for adapters, as planned and with the paper's residency;
512 adapters, 64 requests at a time. Right: predicted against simulated, for each capacity of `plan_error.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.common.figures import panels
from benchmarks.common.options import RESULTS
from benchmarks.moe.plan_error import ADAPTERS, BATCHES, EXPONENTS
from coserve.workloads.popularity import Popularity, Shape, shares
from coserve.workloads.provisioning.admission import immediate_admission

FIGURE = Path("docs/figures/plan_admission.png")
STEP = 8
"""Adapters between two points of a line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FIGURE)
    options = parser.parse_args()
    with panels(options.out, 1, 2, (9, 3.6)) as ((left, right),):
        capacities = range(STEP, ADAPTERS // 2, STEP)
        for color, exponent in zip(("C0", "C1"), EXPONENTS, strict=True):
            of_each = shares(Popularity(Shape.POWER_LAW, exponent), ADAPTERS)
            for keeps, style, what in ((False, "-", "unused ones give way"), (True, ":", "the paper's residency")):
                found = [100 * immediate_admission(of_each, BATCHES[0], one, keeps_idle=keeps) for one in capacities]
                left.plot(capacities, found, style, color=color, label=f"exponent {exponent}, {what}")
        left.set(xlabel="room, in adapters", ylabel="admitted at once, %", ylim=(0, 101))
        left.legend(fontsize=7)
        rows = json.loads((RESULTS / "plan_error.json").read_text())["rows"]
        for batch, marker in zip(BATCHES, "os", strict=True):
            own = [row for key, row in rows.items() if key.startswith(f"infini.admission.b{batch}.")]
            right.errorbar(
                [100 * row["predicted"] for row in own],
                [100 * row["value"] for row in own],
                yerr=[[100 * (r["value"] - r["low"]) for r in own], [100 * (r["high"] - r["value"]) for r in own]],
                fmt=marker,
                label=f"{batch} requests at a time",
            )
        right.plot((90, 100), (90, 100), "k:", label="equal")
        right.set(xlabel="predicted, %", ylabel="simulated: median, least and most of 3, %")
        right.legend(fontsize=7)


if __name__ == "__main__":
    main()
