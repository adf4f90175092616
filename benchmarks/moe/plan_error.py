"""How far the planner's immediate admission is from that of the daemon's own scheduler, simulated.

For each target the planner chooses a capacity, and the scheduler runs with it. 512 adapters by a power law, requests by
a Poisson process so that 64 or 256 run on average, answers of 40 tokens on average (geometric). The scheduler is the
daemon's (`generate/schedule.py`), over a stand-in of the adapters' pages that holds as many as the capacity and evicts
those that no request uses. No model runs: a step is one token of each running sequence. A request is admitted at once
if the step after its arrival computes it. `paper`: what the paper's residency predicts for the same capacity (adapters
that nobody uses hold their places), and the capacity that it would choose.

    python -m benchmarks.moe.plan_error --out benchmarks/results
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

from benchmarks.common.figures import panels
from benchmarks.common.options import RESULTS, make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results, Target
from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.generate.schedule import Scheduler
from coserve.queues.request import Request
from coserve.workloads.distributions import Popularity, Shape, choices, shares
from coserve.workloads.provisioning import immediate_admission, least_capacity
from tests.support.pages import BarePages, FewAdapters

ADAPTERS, LENGTH, REQUESTS, WARM_UP, SEEDS = 512, 40, 6000, 1000, 3
BATCHES, EXPONENTS, TARGETS = (64, 256), (1.0, 1.2), (0.95, 0.99)
FIGURE = Path("docs/figures/plan_admission.png")
STEP = 8
"""Adapters between two points of the figure."""
STEP_SECONDS = 0.03
"""Time of a step, from which the scheduler knows how long a request has been passed."""


def simulated(popularity: Popularity, batch: int, capacity: int, seed: int) -> float:
    """Return the share of the requests after the warm-up that are computed in the step after their arrival."""
    chance, pages = random.Random(seed), BarePages(1 << 17, 16)
    scheduler = Scheduler(pages, FewAdapters(capacity), max_running=8 * batch, step_tokens=64 * batch)
    adapter, left = choices(popularity, ADAPTERS, chance), dict[int, int]()
    step = made = 0
    due, arrived, at_once = chance.expovariate(batch / LENGTH), dict[int, int](), list[bool]()
    while len(at_once) < REQUESTS:
        while due <= step:
            made += 1
            ref, sampling = AdapterRef(str(next(adapter)), 1), SamplingParams(max_tokens=64 * LENGTH)
            request = Request(
                Generate(id=str(made), prompt=(made,), sampling=sampling, adapter=ref, slo=Slo(ttft=1, tpot=1)),
                stop_ids=frozenset(),
            )
            scheduler.add(request)
            arrived[request.number] = step
            left[request.number] = 1 + int(chance.expovariate(1 / LENGTH))
            due += chance.expovariate(batch / LENGTH)
        for share in scheduler.commit(scheduler.propose(), now=step * STEP_SECONDS):
            own = share.request
            own.started = True
            own.computed += share.tokens
            if own.number in arrived:
                late = step - arrived.pop(own.number)
                if made > WARM_UP:
                    at_once.append(late == 0)
            left[own.number] -= 1
            if own.push(0) is not None or not left[own.number]:
                scheduler.remove(own)
        scheduler.changed()
        step += 1
        if len(arrived) > 4 * REQUESTS:  # the queue grows without end
            return 0.0
    return statistics.mean(at_once)


def draw(out: Path, figure: Path) -> None:
    """Left: the share of requests that are admitted at once, by room for adapters, as planned and with the paper's
    residency. Right: predicted against simulated, for each capacity in the results in `out`."""
    with panels(figure, 1, 2, (9, 3.6)) as ((left, right),):
        capacities = range(STEP, ADAPTERS // 2, STEP)
        for color, exponent in zip(("C0", "C1"), EXPONENTS, strict=True):
            of_each = shares(Popularity(Shape.POWER_LAW, exponent), ADAPTERS)
            for keeps, style, what in ((False, "-", "unused ones give way"), (True, ":", "the paper's residency")):
                found = [100 * immediate_admission(of_each, BATCHES[0], one, keeps_idle=keeps) for one in capacities]
                left.plot(capacities, found, style, color=color, label=f"exponent {exponent}, {what}")
        left.set(xlabel="room, in adapters", ylabel="admitted at once, %", ylim=(0, 101))
        left.legend(fontsize=7)
        rows = json.loads((out / "plan_error.json").read_text())["rows"]
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


def main() -> None:
    options = make_parser(__doc__).parse_args()
    settings = {"adapters": ADAPTERS, "length": LENGTH, "requests": REQUESTS, "warm_up": WARM_UP, "seeds": SEEDS}
    results = Results.of(options, "plan_error.json", __file__, settings, hardware=cpu_name())
    errors: dict[str, list[float]] = {}
    """In points, by key."""
    for batch in BATCHES:
        for exponent in EXPONENTS:
            popularity = Popularity(Shape.POWER_LAW, exponent)
            of_each = shares(popularity, ADAPTERS)
            for target in TARGETS:
                capacity = least_capacity(of_each, batch, target)
                runs = [simulated(popularity, batch, capacity, seed) for seed in range(SEEDS)]
                ours, paper = (
                    immediate_admission(of_each, batch, capacity, keeps_idle=keeps) for keeps in (False, True)
                )
                measured = statistics.median(runs)
                for name, predicted in (("", ours), (".paper", paper)):
                    key = f"infini.plan_error.p{100 * target:.0f}{name}"
                    errors.setdefault(key, []).append(round(100 * abs(predicted - measured), 2))
                results.put(
                    f"infini.admission.b{batch}.s{exponent}.p{100 * target:.0f}",
                    round(measured, 4),
                    "share of requests",
                    None,
                    [round(run, 4) for run in runs],
                    {
                        "capacity": capacity,
                        "predicted": round(ours, 4),
                        "paper": round(paper, 4),
                        "capacity_paper": least_capacity(of_each, batch, target, keeps_idle=True),
                    },
                )
    errors["infini.plan_error"] = errors["infini.plan_error.p95"]
    for key, found in errors.items():
        about = {"mean": round(statistics.mean(found), 2), "scheduler": "the daemon's, simulated"}
        results.put(key, max(found), "points", Target(5.0, most=True), found, about)
    draw(options.out, FIGURE if options.out == RESULTS else options.out / FIGURE.name)


if __name__ == "__main__":
    main()
