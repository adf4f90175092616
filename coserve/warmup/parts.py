"""The parts of a warm-up: what is compiled, in which order, and what each part needs first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

RANKS = (16, 32, 64, 128, 256)
"""Largest ranks of a step's adapters that kernels are compiled for (`generate.execution.graph_sizes.LORA_RANKS`)."""
GEMM_ROWS = (1, 16, 32, 64)
"""Most rows of the GEMM kernels (`kernels.gemm.skinny.ROWS`), and one row."""


@dataclass(frozen=True)
class Part:
    """One piece of the work, for one process."""

    name: str
    weight: int
    """About how long it takes, in units of progress."""
    after: frozenset[str] = frozenset()


FIRST = ("profile", "steps", "decodes-16", "prompts-16")
"""What the engine needs before it serves: the profile of its memory, and eager steps."""
LAYERS = "layers"
GEMMS = tuple(f"gemms-{rows}" for rows in GEMM_ROWS)


def graphs(rank: int) -> tuple[str, str]:
    """The parts whose kernels graphs of adapters up to `rank` need: of decode steps, and of mixed steps; 0: no adapters."""
    return f"graphs-{rank}", f"mixed-{rank}"


def training(rank: int) -> str:
    """The part whose kernels jobs with adapters of `rank` need; larger ranks than `RANKS` use those of the last."""
    return f"training-{next((one for one in RANKS if one >= rank), RANKS[-1])}"


def all_parts() -> tuple[Part, ...]:
    """Every part, in the order in which the engine needs them."""
    compiled = frozenset((LAYERS, *GEMMS))
    return (
        Part("profile", 10),
        Part("steps", 12),
        Part("prompts-16", 10),
        Part("decodes-16", 8),
        Part(LAYERS, 12),
        *(Part(name, 4) for name in GEMMS),
        *(Part(name, 15, compiled) for name in graphs(16)),
        *(Part(name, 8, compiled) for name in graphs(0)),
        Part(training(16), 12),
        Part("sites-16", 10),
        *(part for rank in RANKS[1:] for part in _of_rank(rank, compiled)),
    )


def _of_rank(rank: int, compiled: frozenset[str]) -> tuple[Part, ...]:
    decodes, mixed = graphs(rank)
    return (
        Part(f"adapters-{rank}", 10),
        Part(decodes, 15, compiled),
        Part(mixed, 15, compiled),
        Part(training(rank), 8),
    )


class Schedule:
    """Which part is next: a state machine without clock or processes. Each part runs once, after those that it needs."""

    def __init__(self, parts: Iterable[Part], done: Collection[str] = ()) -> None:
        """`done`: names of parts that are complete already."""
        self._parts = {part.name: part for part in parts}
        self._done = {name: self._parts[name].weight for name in done if name in self._parts}
        """Units of progress by part; a part in work may have some."""
        self._complete = set(self._done)
        self._running: set[str] = set()
        self.failed: dict[str, str] = {}
        """Why, by part; parts that needed a failed one have failed too."""

    @property
    def complete(self) -> frozenset[str]:
        return frozenset(self._complete)

    @property
    def ended(self) -> bool:
        """Nothing is left to do, and nothing runs."""
        return len(self._complete) + len(self.failed) == len(self._parts)

    @property
    def progress(self) -> tuple[int, int]:
        """(done, total) units; equal if and only if every part is complete or has failed."""
        total = sum(part.weight for part in self._parts.values())
        lost = sum(self._parts[name].weight for name in self.failed)
        return sum(self._done.values()) + lost, total

    def next(self) -> str | None:
        """Starts the first part that may run now; None: none may."""
        for part in self._parts.values():
            idle = part.name not in self._complete | self._running and part.name not in self.failed
            if idle and part.after & self._parts.keys() <= self._complete:
                self._running.add(part.name)
                return part.name
        return None

    def advance(self, name: str, done: int, total: int) -> None:
        """A running part has done so much of its own work; its last unit counts when it finishes."""
        assert name in self._running, f"expected a running part, got {name}"
        weight = self._parts[name].weight
        self._done[name] = max(self._done.get(name, 0), min(weight - 1, weight * done // max(total, 1)))

    def finish(self, name: str) -> None:
        self._running.remove(name)
        self._complete.add(name)
        self._done[name] = self._parts[name].weight

    def put_back(self, name: str) -> None:
        """The part begins anew some time."""
        self._running.remove(name)

    def fail(self, name: str, why: str) -> None:
        """The part cannot be done, nor can those that need it."""
        self._running.remove(name)
        lost = [name]
        while lost:
            gone = lost.pop()
            self.failed.setdefault(gone, why)
            self._done.pop(gone, None)
            over = self._complete | self.failed.keys()
            lost += [part.name for part in self._parts.values() if gone in part.after and part.name not in over]
