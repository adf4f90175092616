"""CUDA graphs' part, played on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor


class RepeatingRecorder:
    """A `Recorder` that runs the recorded functions again, and writes what they give to the tensors that they gave
    first."""

    bytes = 0

    def __init__(self, fails: Callable[[int], Exception | None] = lambda number: None) -> None:
        """`fails`: of each recording, by number: what it raises."""
        self.pool_runs = self.recorded = self.replayed = 0
        self._fails = fails

    def pool_of_pass(self) -> Callable[[], AbstractContextManager[None]]:
        return self._in_pool

    @contextmanager
    def _in_pool(self) -> Iterator[None]:
        self.pool_runs += 1
        yield

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if (error := self._fails(self.recorded)) is not None:
            raise error
        self.recorded += 1
        found = run()

        def replay() -> None:
            self.replayed += 1
            found.copy_(run())

        return replay, found
