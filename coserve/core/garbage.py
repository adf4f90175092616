"""Run Python's garbage collection when no request or step waits."""

from __future__ import annotations

import gc
from collections.abc import Callable

IDLE = 1.0
"""Idle seconds before a full collection, which takes tens of milliseconds."""
YOUNG_WHEN_IDLE = 1_000
"""New container objects after which an idle process collects its young generations."""
YOUNG_WHEN_BUSY = 10_000
"""New container objects after which a busy process collects its youngest generation; that takes less than 1 ms."""
MIDDLE_INTERVAL = 10
"""Collections of the youngest generation per collection of the middle one, which takes a few milliseconds."""
FULL_INTERVAL = 100
"""Collections of the middle generation per full collection in a busy process: one per some million new objects."""
NEVER = 1 << 30


class GarbageCollection:
    """Decides which generation to collect when. `collect` and `count` are `gc.collect` and `gc.get_count`."""

    def __init__(
        self, collect: Callable[[int], int] = gc.collect, count: Callable[[], tuple[int, int, int]] = gc.get_count
    ) -> None:
        self._collect, self._count = collect, count

    @classmethod
    def none(cls) -> GarbageCollection:
        """Return an instance that never collects: the interpreter collects automatically."""
        return cls(lambda generation: 0, lambda: (0, 0, 0))

    def while_busy(self) -> None:
        """Call between two steps: collect only if garbage could otherwise grow without bound."""
        young, _, full = self._count()
        if full >= FULL_INTERVAL:
            self.collect_all()
        elif young >= YOUNG_WHEN_BUSY:
            self._collect_young()

    def when_idle(self) -> None:
        """Call when there is no work: collect the young generations if they have grown."""
        if self._count()[0] >= YOUNG_WHEN_IDLE:
            self._collect_young()

    @property
    def full_due(self) -> bool:
        """Return whether `collect_all` is to be called after `IDLE` seconds without work."""
        young, middle, full = self._count()
        return young >= YOUNG_WHEN_IDLE or middle > 0 or full > 0

    def collect_all(self) -> None:
        """Make a full collection. Call it after `IDLE` seconds without work."""
        self._collect(2)

    def _collect_young(self) -> None:
        self._collect(1 if self._count()[1] >= MIDDLE_INTERVAL else 0)


def freeze_heap() -> None:
    """Exclude all existing objects (modules, the model, the tokenizer) from later collections.

    Call it once, after the start. Without it a full collection visits every object that the start made: 40 to 65 ms.
    """
    gc.collect()
    gc.freeze()


def freeze_and_disable() -> None:
    """Call `freeze_heap`, then disable automatic collection."""
    freeze_heap()
    gc.disable()


def freeze_and_collect_young() -> None:
    """Call `freeze_heap`, then limit automatic collection to the young generations: a few milliseconds at most."""
    freeze_heap()
    gc.set_threshold(2_000, MIDDLE_INTERVAL, NEVER)
