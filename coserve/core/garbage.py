"""Garbage collection at moments when nothing waits for it."""

from __future__ import annotations

import gc
from collections.abc import Callable

IDLE = 1.0
"""Seconds without work before a full collection, which takes some ten milliseconds."""
YOUNG_WHEN_IDLE = 1_000
"""New container objects from which an idle process collects its young generations."""
YOUNG_WHEN_BUSY = 10_000
"""New container objects from which a busy process collects its youngest generation: less than a millisecond."""
MIDDLE_INTERVAL = 10
"""Collections of the youngest generation before the middle one is collected too, which takes some milliseconds."""
FULL_INTERVAL = 100
"""Collections of the middle generation before a busy process makes a full one: after some million new objects."""
NEVER = 1 << 30


class GarbageCollection:
    """Decides when which generation is collected. `collect` and `count`: `gc.collect` and `gc.get_count`."""

    def __init__(
        self,
        collect: Callable[[int], int] = gc.collect,
        count: Callable[[], tuple[int, int, int]] = gc.get_count,
    ) -> None:
        self._collect, self._count = collect, count

    @classmethod
    def none(cls) -> GarbageCollection:
        """Collects nothing: the interpreter does."""
        return cls(lambda generation: 0, lambda: (0, 0, 0))

    def while_busy(self) -> None:
        """Between two steps: collect only if garbage could otherwise grow without bound."""
        young, _, full = self._count()
        if full >= FULL_INTERVAL:
            self.collect_all()
        elif young >= YOUNG_WHEN_BUSY:
            self._collect_young()

    def when_idle(self) -> None:
        """Nothing is to be done now: collect the young generations if they have grown."""
        if self._count()[0] >= YOUNG_WHEN_IDLE:
            self._collect_young()

    @property
    def full_due(self) -> bool:
        """Whether to call `collect_all` after `IDLE` seconds without work."""
        young, middle, full = self._count()
        return young >= YOUNG_WHEN_IDLE or middle > 0 or full > 0

    def collect_all(self) -> None:
        """A full collection, after `IDLE` seconds without work."""
        self._collect(2)

    def _collect_young(self) -> None:
        self._collect(1 if self._count()[1] >= MIDDLE_INTERVAL else 0)


def freeze_heap() -> None:
    """Exclude all existing objects (modules, the model, the tokenizer) from later collections.

    A full collection visits every object: 40 to 65 ms with the objects of a start. Call it once, after the start.
    """
    gc.collect()
    gc.freeze()


def freeze_and_disable() -> None:
    """`freeze_heap`, then disable automatic collections."""
    freeze_heap()
    gc.disable()


def freeze_and_collect_young() -> None:
    """`freeze_heap`, then collect only young generations automatically: a few milliseconds at most."""
    freeze_heap()
    gc.set_threshold(2_000, MIDDLE_INTERVAL, NEVER)
