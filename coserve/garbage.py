"""Garbage collections at moments when nobody waits for them."""

from __future__ import annotations

import gc
from collections.abc import Callable

IDLE = 1.0
"""Seconds without work after which a process may collect all its garbage: some ten milliseconds."""
WORTH_IT = 1_000
"""Containers made, and not freed, since the last collection, from which on an idle moment is used for one."""
YOUNG = 10_000
"""The same, from which on work is interrupted for the youngest generation: less than a millisecond."""
MIDDLE = 10
"""Collections of the youngest generation until the middle one is collected with it: some milliseconds."""
OLD = 100
"""Collections of the middle generation until work is interrupted for a full one: some million containers were made and
not freed since the last idle moment."""
NEVER = 1 << 30


class GarbageCollection:
    """When which generation is collected. `collect` and `count`: `gc.collect` and `gc.get_count`."""

    def __init__(
        self,
        collect: Callable[[int], int] = gc.collect,
        count: Callable[[], tuple[int, int, int]] = gc.get_count,
        *,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """`settle`: takes the place of the first full collection after `warm` was called; until then many objects are made
        that stay, and no work is interrupted for a full collection. None: the process is warm."""
        self._collect, self._count, self._settle = collect, count, settle
        self._warm = settle is None
        self._old = 0
        """Collections of the middle generation that do not count: they came before the process was warm."""

    @classmethod
    def none(cls) -> GarbageCollection:
        """Leaves all to the interpreter."""
        return cls(lambda generation: 0, lambda: (0, 0, 0))

    def warm(self) -> None:
        """All objects that stay have been made."""
        self._warm, self._old = True, self._count()[2]

    def bound(self) -> None:
        """Between two pieces of work: a collection if garbage could grow without bound otherwise."""
        young, middle, old = self._count()
        if self._warm and old - self._old >= OLD:
            self.full()
        elif young >= YOUNG:
            self._collect(1 if middle >= MIDDLE else 0)

    def idle(self) -> None:
        """There is nothing to do now: the young generations if it is worth it."""
        young, middle, _ = self._count()
        if young >= WORTH_IT:
            self._collect(1 if middle >= MIDDLE else 0)

    @property
    def due(self) -> bool:
        """A full collection is worth it, once there was nothing to do for `IDLE` seconds."""
        young, middle, old = self._count()
        return young >= WORTH_IT or middle > 0 or old > 0

    def full(self) -> None:
        """There was nothing to do for `IDLE` seconds."""
        self._old = 0
        if self._warm and self._settle is not None:
            settle, self._settle = self._settle, None
            settle()
        else:
            self._collect(2)


def freeze_heap() -> None:
    """Exclude all existing objects (modules, classes, the model, the tokenizer) from later collections.

    A full collection visits every object: 40 to 65 ms with the objects of a start. Call it once, after the start.
    """
    gc.collect()
    gc.freeze()


def collect_when_told() -> None:
    """As `freeze_heap`, and no automatic collections from now on."""
    freeze_heap()
    gc.disable()


def collect_young_alone() -> None:
    """As `freeze_heap`, and automatic collections of the young generations only: a few milliseconds at most."""
    freeze_heap()
    gc.set_threshold(2_000, MIDDLE, NEVER)
