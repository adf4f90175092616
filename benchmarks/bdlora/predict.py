"""Predicts decode on four and eight GPUs from what one and two did: a model of bytes, messages and fixed times. No GPU.

    python -m benchmarks.bdlora.predict

A step of one request on N GPUs takes

    weights / N / bandwidth + fixed + messages × t(N) + adapter

*Bandwidth* and *fixed* (attention, norms, launches) solve the base's steps on one and two GPUs. t(2) is the measured
all-reduce. t(N) is not known: from t(2), if GPUs read each other at once, to t(2) log2 N. *Adapter*: at two GPUs what a
step takes longer than the base's, without its own messages; the part above the least of all ranks of LoRA is bytes, and
changes as the bytes that a GPU holds. The fixed part is that of a layer, times layers.

The model has as many unknowns as there are rows, so nothing checks it before four GPUs do. Keys end in `.low` and
`.high`, by t(N).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.bdlora.plan import SHAPES, STRATEGIES, Shape, Strategy, Variant, bd_rank
from benchmarks.bdlora.results import LEAST_RANK, TARGETS
from benchmarks.common.options import RESULTS, make_parser
from benchmarks.common.results import Results, Target, summarize

FILE, MEASURED = "bdlora_predicted.json", "bdlora_da60234.json"
SIZES = (4, 8)
RANKS = (16, 32, 64, 128, 256)
BASE_MESSAGES, SLORA_MESSAGES = 2, 4
"""All-reduces of a layer: of the base, and more of fully sharded adapters."""
BYTES = 2
"""Of a weight."""


def held(strategy: Strategy, rank: int, shape: Shape, size: int) -> int:
    """Parameters of an adapter at all sites that one of `size` GPUs holds. `rank`: LoRA's."""
    kv = shape.hidden * shape.kv_heads // shape.heads
    column = [(shape.hidden, out) for out in (shape.hidden, kv, kv, shape.inner, shape.inner)]
    row = [(shape.hidden, shape.hidden), (shape.inner, shape.hidden)]
    if strategy == "bd":
        own = bd_rank(Variant(shape.name, "bd", rank), shape, size) // size
        layer = sum(own * (i + o // size) for i, o in column) + sum(own * (i // size + o) for i, o in row)
    elif strategy == "nfs":
        layer = sum(rank * (i + o // size) for i, o in column) + sum(rank * (i // size + o) for i, o in row)
    else:
        layer = sum(rank * (i + o) // size for i, o in (*column, *row))
    return layer * shape.layers


def weights(shape: Shape) -> int:
    """Parameters that a step of the whole base reads: the layers' and the head's."""
    layer, head = shape.parameters()
    return layer * shape.layers + head


@dataclass(frozen=True)
class Model:
    """Fitted to an 8B shape. Milliseconds."""

    shape: Shape
    per_parameter: float
    """Of the base."""
    fixed: float
    """Of all layers."""
    message: float
    """t(2)."""
    least: float
    """Of an adapter, at any rank."""
    adapters: Mapping[tuple[Strategy, int], float]
    """What a step with an adapter of this rank takes longer at two GPUs, without its own messages."""

    def step(self, strategy: Strategy | None, rank: int, shape: Shape, size: int, *, spread: float) -> float:
        """Milliseconds of a decode step of one request. `spread`: 0 for the least t(N), 1 for the most."""
        layers = shape.layers / self.shape.layers
        messages = shape.layers * (BASE_MESSAGES + (SLORA_MESSAGES if strategy == "slora" else 0))
        message = self.message * (1 + spread * (math.log2(size) - 1))
        base = self.per_parameter * weights(shape) / size + self.fixed * layers + messages * message
        if strategy is None:
            return base
        above = (self.adapters[strategy, rank] - self.least) / held(strategy, rank, self.shape, 2)
        return base + self.least * layers + above * held(strategy, rank, shape, size)


def fit(rows: Mapping[str, Mapping[str, Any]]) -> Model:
    """From the rows of `bdlora.json`."""
    shape = SHAPES["8b"]
    one, two = (float(rows[f"bdlora.8b.tp{size}.decode_ms.base.b1.c272"]["value"]) for size in ("1of2", "2"))
    kernels = rows["bdlora.8b.tp2.profile_ms.base.b1.c272"]["by_kernel"]
    ((total, count),) = ((ms, count) for name, ms, count in kernels if "one_shot_all_reduce" in name)
    message = total / count
    sent = shape.layers * BASE_MESSAGES * message
    half = one - (two - sent)
    own = float(rows["bdlora.8b.tp2.tok_s.base.b1.16x512"]["decode_ms"]["median"])
    adapters = {}
    for strategy in STRATEGIES:
        more = shape.layers * SLORA_MESSAGES * message if strategy == "slora" else 0.0
        for rank in RANKS:
            row = rows[f"bdlora.8b.tp2.tok_s.{strategy}.r{rank}.b1.16x512"]
            adapters[strategy, rank] = float(row["decode_ms"]["median"]) - own - more
    return Model(shape, 2 * half / weights(shape), one - 2 * half, message, min(adapters.values()), adapters)


def predictions(model: Model) -> dict[str, tuple[float, float, Target | None]]:
    """By key: at the least and the most t(N), and the measured key's target."""
    found = dict[str, tuple[float, float, Target | None]]()

    def put(key: str, ratios: list[tuple[float, float]], target: float | None) -> None:
        least = min(ratios, key=min)
        found[key] = min(least), max(least), None if target is None else Target(target)

    for shape in (SHAPES["8b"], SHAPES["70b"]):
        for size in SIZES:

            def steps(
                strategy: Strategy | None, rank: int = 0, *, shape: Shape = shape, size: int = size
            ) -> list[float]:
                return [model.step(strategy, rank, shape, size, spread=spread) for spread in (0.0, 1.0)]

            def ratios(other: Strategy, ranks: tuple[int, ...]) -> list[tuple[float, float]]:
                pairs = [zip(steps(other, rank), steps("bd", rank), strict=True) for rank in ranks]
                return [(low[0] / low[1], high[0] / high[1]) for low, high in pairs]

            large = tuple(rank for rank in RANKS if rank >= LEAST_RANK)
            for other in ("slora", "nfs"):
                name = f"speedup_vs_{other}"
                target = TARGETS.get(f"{name}.{shape.name}", {}).get(size) or TARGETS.get(name, {}).get(size)
                put(f"bd.predicted.{name}.tp{size}.{shape.name}", ratios(other, large), target)
            every = [pair for other in ("slora", "nfs") for pair in ratios(other, RANKS)]
            put(f"bd.predicted.min_speedup.tp{size}.{shape.name}", every, 0.98)
            half = [model.step(None, 0, shape, size // 2, spread=spread) for spread in (0.0, 1.0)]
            target = 1.6 if (shape.name, size) == ("70b", 4) else None
            both = [(low / own, high / more) for (low, high), (own, more) in [(half, steps(None))]]
            put(f"tp.predicted.decode_speedup.tp{size // 2}_{size}.{shape.name}", both, target)
    return found


def main() -> None:
    options = make_parser(__doc__).parse_args()
    model = fit(json.loads((RESULTS / MEASURED).read_text())["rows"])
    settings = {"bandwidth_tb_s": round(BYTES / model.per_parameter / 1e9, 3), "fixed_ms": round(model.fixed, 3)}
    settings |= {"message_us": round(model.message * 1e3, 2), "adapter_least_ms": round(model.least, 3)}
    results = Results.of(options, FILE, __file__, settings, hardware=f"none: from {MEASURED}, of two H200s")
    for key, (low, high, target) in predictions(model).items():
        about = {"note": "predicted, not measured", "target_when_measured": None if target is None else str(target)}
        results.put(key, round(low, 3), "ratio", None, [round(low, 3), round(high, 3)], about)
    summarize(FILE, options.out)


if __name__ == "__main__":
    main()
