"""The parts of a warm-up: what each one compiles, their order, and which parts each one requires."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from coserve.types import DEFAULT_RANK

RANKS = (16, 32, 64, 128, 256)
"""Ranks that kernels are compiled for: a step uses the next one from its largest rank up. As `graph_sizes.LORA_RANKS`."""
GEMM_ROWS = (1, 16, 32, 64)
"""Row counts that GEMM kernels are measured for: 1 (GEMV), and those of `kernels.gemm.skinny.ROWS`."""


@dataclass(frozen=True)
class Part:
    """A unit of work that one worker process does, such as all decode graphs of one rank."""

    name: str
    weight: int
    """Expected duration, in units of progress."""
    requires: frozenset[str] = frozenset()
    """Names of parts that must be complete before it starts. If one fails, so does this part."""
    after: frozenset[str] = frozenset()
    """Names of parts that must be complete, or have failed, before it starts."""
    urgent: bool = False
    """While it waits for parts that it needs, no later part starts: each would keep a process for many seconds."""


EAGER = ("steps", f"decodes-{DEFAULT_RANK}", f"prompts-{DEFAULT_RANK}")
"""Parts with the kernels of steps without compiled layers."""
SCORED = ("steps", f"prompts-{DEFAULT_RANK}")
"""Parts with the kernels of prompts that are scored, which always run without compiled layers."""
LAYERS = "layers"
TRAINING_LAYERS = "training-layers"
"""The part with the compiled layers of training, forward and backward."""
TRAINING_LEVELS = "training-levels"
"""The part with the compiled layers of training that keep less, for jobs whose memory is short."""
GEMMS = tuple(f"gemms-{rows}" for rows in GEMM_ROWS)


def graphs(rank: int) -> tuple[str, str]:
    """Names of the parts with the kernels of decode graphs and of mixed graphs, for adapters up to `rank`; 0: no adapters."""
    return f"graphs-{rank}", f"mixed-{rank}"


STEP_PARTS = (*graphs(0), *graphs(DEFAULT_RANK))
"""Parts that must be complete before the engine runs compiled steps."""
SLOT_KERNELS = f"kernels-{DEFAULT_RANK}"
"""The part with the LoRA kernels of graphs, which need no compiled layers: while these are compiled. The parts of graphs find those that are done."""
PROFILE = "profile"
"""The part with the kernels of the memory profile, which the engine measures before it allocates its pool."""
FIRST = (PROFILE, *STEP_PARTS)
"""Parts that must be complete before the engine serves. Eager steps would be too slow for the requests that come meanwhile:
they would still wait when all is warm."""


def training(rank: int) -> str:
    """Name of the part with the training kernels for `rank`; ranks above those of `RANKS` use the last one's."""
    return f"training-{next((one for one in RANKS if one >= rank), RANKS[-1])}"


def blocks(rank: int) -> str:
    """Name of the part with the training kernels for block-diagonal adapters of `rank` (see `training`)."""
    return training(rank).replace("training", "blocks")


def gpu(number: int) -> str:
    """Name of the part that compiles the layers for another GPU than the first: inductor's code names its device."""
    return f"gpu-{number}"


def gpu_of(part: str) -> int:
    """The number of the GPU that a part runs on."""
    kind, _, number = part.partition("-")
    return int(number) if kind == "gpu" else 0


def all_parts(ranks: int = 1) -> tuple[Part, ...]:
    """Every part, most urgent first. `ranks`: GPUs that share the base."""
    layers, gemms = frozenset({LAYERS}), frozenset(GEMMS)  # without the measured choice, graphs have torch's GEMMs
    return (
        Part(LAYERS, 12),
        Part(PROFILE, 10),
        Part(SLOT_KERNELS, 8),
        *(Part(name, 4) for name in GEMMS),
        Part(f"prompts-{DEFAULT_RANK}", 10),  # with kernels of the urgent parts, while the layers compile
        Part("steps", 12),
        *(Part(name, 15, layers, gemms, urgent=True) for name in reversed(graphs(DEFAULT_RANK))),
        *(Part(name, 8, layers, gemms, urgent=True) for name in reversed(graphs(0))),
        Part(TRAINING_LAYERS, 15, after=layers),
        Part(training(DEFAULT_RANK), 12),
        Part(f"decodes-{DEFAULT_RANK}", 8),
        Part(f"sites-{DEFAULT_RANK}", 10),
        Part(TRAINING_LEVELS, 15, frozenset({TRAINING_LAYERS}), frozenset({training(DEFAULT_RANK)})),
        *(Part(gpu(number), 20, layers, gemms) for number in range(1, ranks)),
        *(part for rank in RANKS if rank != DEFAULT_RANK for part in _of_rank(rank, layers, gemms)),
        *(Part(blocks(rank), 8) for rank in RANKS),
    )


def _of_rank(rank: int, layers: frozenset[str], gemms: frozenset[str]) -> tuple[Part, ...]:
    decodes, mixed = graphs(rank)
    return (
        Part(f"adapters-{rank}", 10),
        Part(decodes, 15, layers, gemms),
        Part(mixed, 15, layers, gemms),
        Part(training(rank), 8),
    )


class PartSchedule:
    """State of all parts: waiting, running, complete or failed. Pure: no clock, no processes."""

    def __init__(self, parts: Iterable[Part], done: Collection[str] = ()) -> None:
        """`done`: names of parts that are already complete."""
        self._parts = {part.name: part for part in parts}
        self._done = {name: self._parts[name].weight for name in done if name in self._parts}
        """Units of progress of each complete or running part."""
        self._complete = set(self._done)
        self._running: set[str] = set()
        self.failed: dict[str, str] = {}
        """The reason by part. A part that requires a failed one has failed too."""

    @property
    def complete(self) -> frozenset[str]:
        return frozenset(self._complete)

    @property
    def ended(self) -> bool:
        """Every part is complete or has failed."""
        return len(self._complete) + len(self.failed) == len(self._parts)

    @property
    def progress(self) -> tuple[int, int]:
        """(done, total) units; equal if and only if every part is complete or has failed."""
        total = sum(part.weight for part in self._parts.values())
        failed = sum(self._parts[name].weight for name in self.failed)
        return sum(self._done.values()) + failed, total

    def next(self) -> str | None:
        """Mark the first part that can start now as running, and return its name; None if none can."""
        known, ended = self._parts.keys(), self._complete | self.failed.keys()
        for part in self._parts.values():
            ready = part.requires & known <= self._complete and part.after & known <= ended
            if part.name in ended | self._running:
                continue
            if ready:
                self._running.add(part.name)
                return part.name
            if part.urgent:
                return None
        return None

    def advance(self, name: str, done: int, total: int) -> None:
        """A running part has done `done` of `total` of its work. Its last unit counts only when it finishes."""
        assert name in self._running, f"expected a running part, got {name}"
        weight = self._parts[name].weight
        self._done[name] = max(self._done.get(name, 0), min(weight - 1, weight * done // max(total, 1)))

    def finish(self, name: str) -> None:
        self._running.remove(name)
        self._complete.add(name)
        self._done[name] = self._parts[name].weight

    def put_back(self, name: str) -> None:
        """A running part waits again, to be run from its beginning."""
        self._running.remove(name)

    def fail(self, name: str, why: str) -> None:
        """A running part has failed, and with it all parts that require it."""
        self._running.remove(name)
        failing = [name]
        while failing:
            failed = failing.pop()
            self.failed.setdefault(failed, why)
            self._done.pop(failed, None)
            ended = self._complete | self.failed.keys()
            failing += [
                part.name for part in self._parts.values() if failed in part.requires and part.name not in ended
            ]
