"""Profile of figure 5.1: the time that each kernel adds to a layer of a decode step, and the host time of fine-tuning.

    python -m benchmarks.ets.figure_5_1_trace --out benchmarks/results
    TRITON_INTERPRET=1 python -m benchmarks.ets.figure_5_1_trace --tiny --out /tmp/tried

With one adapter and with as many as the figure has at most, at its default batch. A kernel adds the time from the end
of all earlier kernels to its own end, so overlapping time counts once and the kernels of a layer add up to the layer.
Tracing makes the gaps between kernels a little longer.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from benchmarks.common.timing import synchronize
from benchmarks.common.traces import Kernel, added, busy, traced
from benchmarks.ets.figure_5_1 import ask, finetuning, inference, make_base, serving
from benchmarks.ets.figure_5_1_shape import GRAPHS, PAPER, SEED, TINY, Shape
from coserve.generate.generator import Generator
from coserve.model.base import Base

FILE = "figure_5_1_trace.json"
LAYER = "decode"
"""The attention kernel: each layer has one, and begins with it here."""
SKIPPED, STEPS = 3, 6
"""Decode steps ahead of those that are traced, and how many are."""
LISTED = 20
"""Kernels of a layer that get a row; the rest is `others`."""


def layers_of(kernels: Sequence[Kernel], first: str = LAYER) -> list[dict[str, float]]:
    """What each kernel adds to each layer of one step; a layer is from the end of what is ahead of one `first` to the
    end of what is ahead of the next. Keys: the kernel's index in the layer and its name."""
    names = added(kernels)
    starts = [index for index, (name, _) in enumerate(names) if name == first]
    found = []
    for begin, end in pairwise(starts):
        found.append({f"{place:02d}.{name[:40]}": us for place, (name, us) in enumerate(names[begin:end])})
    return found


def decode(base: Base, generator: Generator, shape: Shape, adapters: int, results: Results) -> None:
    """Rows of a layer of a decode step with so many adapters."""
    generate = inference(generator, shape, shape.batch, adapters)
    for run in range(2 * shape.repeats):
        generate(run % shape.repeats)
        while generator.prepare():
            pass
    layers: list[dict[str, float]] = []
    ask(generator, shape, shape.batch, adapters, 0)
    for _ in range(SKIPPED):
        generator.step()
    for _ in range(min(STEPS, shape.output - SKIPPED - 2)):
        layers += layers_of(traced(generator.step, base.device))
    while generator.running:
        generator.step()
    if not layers:
        print("no kernels were traced: this needs a GPU", flush=True)
        return
    spans = [sum(layer.values()) for layer in layers]
    about = {"adapters": adapters, "layers": len(layers)}
    results.put(f"decode.a{adapters}.layer", round(statistics.median(spans), 2), "us", None, spans, about)
    of: dict[str, list[float]] = defaultdict(list)
    for layer in layers:
        for name, us in layer.items():
            of[name].append(us)
    for name in sorted(of)[:LISTED]:
        results.put(f"decode.a{adapters}.{name}", round(statistics.median(of[name]), 2), "us", None, of[name], about)


def training(base: Base, shape: Shape, adapters: int, results: Results) -> None:
    """Rows of a fine-tuning step: how long the host launches it, the device works, and all of it takes."""
    train = finetuning(base, shape, "segmented", shape.batch, adapters)
    for run in range(2 * shape.repeats):
        train(run % shape.repeats)
    launched, whole = list[float](), list[float]()
    for _ in range(shape.repeats):
        synchronize(base.device)
        began = time.perf_counter()
        train(0)
        launched.append(1e3 * (time.perf_counter() - began))
        synchronize(base.device)
        whole.append(1e3 * (time.perf_counter() - began))
    works = [busy(traced(lambda: train(0), base.device)) / 1e3 for _ in range(shape.repeats)]
    for name, values in (("launched", launched), ("whole", whole), ("busy", works)):
        key = f"finetuning.a{adapters}.{name}"
        if any(values):  # without a GPU there are no kernels
            results.put(key, round(statistics.median(values), 2), "ms", None, values, {"adapters": adapters})


def main() -> None:
    parser = make_parser(__doc__, tiny="a small shape on the CPU, to try the script")
    given = parser.parse_args()
    shape = TINY if given.tiny else PAPER
    results = Results.of(given, FILE, __file__, vars(shape), seed=SEED)
    base = make_base(shape)
    ends = (shape.counts[0], shape.counts[-1])
    generator = serving(base, shape, GRAPHS)
    gc.collect()
    gc.freeze()
    for adapters in ends:
        decode(base, generator, shape, adapters, results)
    for adapters in ends:
        training(base, shape, adapters, results)


if __name__ == "__main__":
    main()
