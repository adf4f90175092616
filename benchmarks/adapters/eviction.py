"""Which adapters should leave the host: hits and seconds of reading under several orders of eviction, simulated.

    python -m benchmarks.adapters.eviction --out benchmarks/results

2,000 adapters of ranks 8, 16, 32 and 64 (10.5 MB to 84 MB, an 8B base's q, k, v, o and the like), requests with the
popularity of a power law (S-LoRA, section 6.2), each adapter's own Gamma arrivals of coefficient cv; the host holds a
share of all bytes. A read costs 2 ms and its bytes at 8 GB/s. Each row is the mean of the seeds. Needs no GPU.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Protocol

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results
from coserve.lora.store.eviction import GreedyDual
from coserve.workloads.arrivals import Arrivals, Process, arrival_times
from coserve.workloads.popularity import Popularity, Shape, shares

ADAPTERS, REQUESTS, SEEDS = 2000, 20_000, 5
RANK_BYTES, RANKS = 1_310_720, (8, 16, 32, 64)
SHARES = (0.1, 0.25, 0.5)
LOADS = ((0.0, 1.0), (0.6, 1.0), (1.0, 1.0), (1.2, 1.0), (1.0, 4.0))
"""(exponent of the power law, cv)."""


class Order(Protocol):
    """An order of eviction: see `GreedyDual`."""

    def used(self, key: int, size: int, uses: int = 1) -> None: ...
    def pop(self, may_leave: Callable[[int], bool]) -> int | None: ...


class LeastRecent:
    """LRU."""

    def __init__(self) -> None:
        self._held = dict[int, None]()

    def used(self, key: int, size: int, uses: int = 1) -> None:
        self._held.pop(key, None)
        self._held[key] = None

    def pop(self, may_leave: Callable[[int], bool]) -> int | None:
        found = next(filter(may_leave, self._held))
        del self._held[found]
        return found


class EqualSizes(GreedyDual[int]):
    """Greedy dual by frequency alone."""

    def used(self, key: int, size: int, uses: int = 1) -> None:
        super().used(key, 1 << 40, uses)


ORDERS: dict[str, Callable[[], Order]] = {
    "lru": LeastRecent,
    "frequency": EqualSizes,
    "frequency_size": GreedyDual[int],
}


def trace(exponent: float, cv: float, rng: random.Random) -> list[int]:
    """Adapters of the requests, in order of arrival. Popularity has nothing to do with size."""
    found, arrivals = list[tuple[float, int]](), Arrivals(process=Process.GAMMA, rate=1.0, cv=cv)
    ids = rng.sample(range(ADAPTERS), ADAPTERS)
    for id, share in zip(ids, shares(Popularity(Shape.POWER_LAW, exponent), ADAPTERS), strict=True):
        found += [(at, id) for at in arrival_times(arrivals, REQUESTS, rng, share=share)]
    return [id for _, id in sorted(found)]


def run(order: Order, wanted: list[int], size: list[int], budget: int) -> tuple[float, float]:
    """Return the share of hits, and seconds of reading per 1,000 requests, in the trace's second half."""
    held, taken, hits, seconds = set[int](), 0, 0, 0.0
    for number, id in enumerate(wanted):
        counts = number >= len(wanted) // 2
        if id in held:
            hits += counts
        else:
            seconds += (0.002 + size[id] / 8e9) * counts
            while taken + size[id] > budget and held:
                gone = order.pop(lambda _: True)
                assert gone is not None
                held.remove(gone)
                taken -= size[gone]
            held.add(id)
            taken += size[id]
        order.used(id, size[id])
    half = len(wanted) - len(wanted) // 2
    return hits / half, 1000 * seconds / half


def main() -> None:
    options = make_parser(__doc__).parse_args()
    results = Results.of(
        options,
        "adapter_eviction.json",
        script="benchmarks.adapters.eviction",
        hardware=cpu_name(),
        seed=0,
        settings={"adapters": ADAPTERS, "requests": REQUESTS, "seeds": SEEDS, "ranks": RANKS},
    )
    for exponent, cv in LOADS:
        for share in SHARES:
            for name, make in ORDERS.items():
                found = []
                for seed in range(SEEDS):
                    rng = random.Random(seed)
                    size = [RANK_BYTES * rng.choice(RANKS) for _ in range(ADAPTERS)]
                    found.append(run(make(), trace(exponent, cv, rng), size, int(share * sum(size))))
                hits, seconds = zip(*found, strict=True)
                key = f"adapters.eviction.{name}.alpha{exponent:g}.cv{cv:g}.{share:.0%}"
                about = {"hits": round(statistics.mean(hits), 4)}
                results.put(key, round(statistics.mean(seconds), 3), "s per 1000 requests", values=seconds, about=about)


if __name__ == "__main__":
    main()
