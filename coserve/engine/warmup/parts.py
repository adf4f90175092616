"""The parts of a warm-up: what each one compiles, their order, and their dependencies; and the messages between its
processes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from coserve.core.gpu_memory import LORA_RANKS
from coserve.core.types import DEFAULT_RANK

FailureKind = Literal["memory", "unsupported", "error"]
"""Why a part failed: the GPU's memory is full; this base cannot be compiled; any other error."""


class WarmUpTask(msgspec.Struct, frozen=True):
    """Description of a whole warm-up: what to compile, and where to keep it."""

    config: str
    """The settings, from `config_to_json`."""
    folder: str
    """The cache folder."""
    fields: dict[str, str]
    """`key.key_fields` of this machine."""
    shape: str
    """`key.shape_key` of the settings."""
    workers: int
    """Most processes that use the GPU at once."""


class PartReport(msgspec.Struct, frozen=True):
    """A worker's progress in a part, which ends with `done == total`, or with a `failure`."""

    done: int
    total: int
    failure: FailureKind | None = None
    reason: str = ""


class Progress(msgspec.Struct, frozen=True):
    """Progress of a warm-up, in units of `parts.Part.weight`, for the engine and the command line."""

    done: int
    total: int
    notes: list[str] = []
    """Failures, for the operator."""
    waiting: bool = False
    """Whether another process holds the cache folder."""
    ended: bool = False
    """Whether all parts are complete or have failed, and no process uses the GPU any more."""


GEMM_ROWS = (1, 16, 32, 64)
"""Row counts that GEMM kernels are measured for: 1 (GEMV), and those of `kernels.gemm.skinny.ROWS`."""
LAYERS = "layers"
TRAINING_LAYERS = "training-layers"
"""The compiled layers of training, forward and backward."""
TRAINING_LEVELS = "training-levels"
"""The compiled training layers that keep fewer activations, for jobs that are short of memory."""
GEMMS = tuple(f"gemms-{rows}" for rows in GEMM_ROWS)


@dataclass(frozen=True)
class Part:
    """A unit of work of a warm-up for one worker, such as all decode graphs of one LoRA rank. Its name is a kind, and a
    number or a word."""

    name: str
    weight: int
    """Expected duration, in units of progress."""
    after: frozenset[str] = frozenset()
    """Names of parts that must end first, because it uses what they compiled or measured."""


def gpu_of(part: str) -> int:
    """The number of the GPU that a part runs on."""
    kind, _, number = part.partition("-")
    return int(number) if kind == "gpu" else 0


def all_parts(ranks: int = 1) -> tuple[Part, ...]:
    """Every part, in start order. `ranks`: GPUs that share the base. Inductor's code names its device, so a part for
    each further GPU compiles the layers there."""
    compiled = frozenset({LAYERS, *GEMMS})
    kernels = f"kernels-{DEFAULT_RANK}"  # kernels of graphs, while the layers are compiled
    return (
        Part(LAYERS, 12),
        *(Part(name, 4) for name in GEMMS),
        Part(kernels, 8),
        Part("profile", 10),
        Part(f"adapters-{DEFAULT_RANK}", 28),
        Part(TRAINING_LAYERS, 15, frozenset({LAYERS})),
        Part(TRAINING_LEVELS, 15, frozenset({TRAINING_LAYERS})),
        *(Part(f"gpu-{number}", 20, compiled) for number in range(1, ranks)),
        *(Part(f"{kind}-{DEFAULT_RANK}", 15, compiled | {kernels}) for kind in ("mixed", "graphs")),
        *(Part(f"{kind}-0", 8, compiled) for kind in ("mixed", "graphs")),
        Part("steps", 12),
        Part(f"training-{DEFAULT_RANK}", 12),
        *(part for rank in LORA_RANKS if rank != DEFAULT_RANK for part in _of_rank(rank, compiled)),
        *(Part(f"blocks-{rank}", 8) for rank in LORA_RANKS),
    )


def _of_rank(rank: int, compiled: frozenset[str]) -> tuple[Part, ...]:
    return (
        Part(f"graphs-{rank}", 15, compiled),
        Part(f"mixed-{rank}", 15, compiled),
        Part(f"adapters-{rank}", 10),
        Part(f"training-{rank}", 8),
    )


def units(ranks: int) -> int:
    """Total weight of all parts."""
    return sum(part.weight for part in all_parts(ranks))


class PartSchedule:
    """State of all parts: waiting, running, complete or failed. Pure: no clock, no processes."""

    def __init__(self, parts: Iterable[Part], complete: Collection[str] = ()) -> None:
        """`complete`: names of parts that are on disk already."""
        self._parts = {part.name: part for part in parts}
        self._units = {name: self._parts[name].weight for name in complete if name in self._parts}
        """Progress units of each part that is not waiting."""
        self.complete = set(self._units)
        self._running = set[str]()
        self.failed = dict[str, str]()
        """Failure reasons by part. A part that would fail at every start is also in `complete`."""

    @property
    def ended(self) -> bool:
        """Whether every part is complete or has failed."""
        return self.complete | self.failed.keys() == self._parts.keys()

    @property
    def progress(self) -> tuple[int, int]:
        """(done, total) units; equal if and only if every part is complete or has failed."""
        return sum(self._units.values()), sum(part.weight for part in self._parts.values())

    def next(self) -> str | None:
        """Mark the first part that can start now as running, and return its name; None if none can."""
        ended = self.complete | self.failed.keys()
        for name, part in self._parts.items():
            if name not in ended | self._running and part.after & self._parts.keys() <= ended:
                self._running.add(name)
                return name
        return None

    def advance(self, name: str, done: int, total: int) -> None:
        """Update a running part's progress: `done` of `total`. Its last unit counts only when it finishes."""
        weight = self._parts[name].weight
        self._units[name] = max(self._units.get(name, 0), min(weight - 1, weight * done // max(total, 1)))

    def finish(self, name: str, why: str | None = None, *, for_good: bool = False) -> None:
        """End a running part: complete, or failed with the reason `why`; `for_good`: it would fail at the next start
        too."""
        self._running.remove(name)
        self._units[name] = self._parts[name].weight
        if why is None or for_good:
            self.complete.add(name)
        if why is not None:
            self.failed[name] = why

    def put_back(self, name: str) -> None:
        """Return a running part to waiting, to be run from its beginning."""
        self._running.remove(name)
