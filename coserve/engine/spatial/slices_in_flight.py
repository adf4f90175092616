"""Training slices that the device runs beside generation steps: they are launched, and their end is an event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from coserve.errors import EngineFault
from coserve.queues.policy import InFlight, Train
from coserve.types import MicroStep

Mark = Callable[[], Future[None]]
"""The future is done, on any thread, once the device has computed all training that was launched before the call. Its exception
is the device's failure. Futures are done in the order of the calls."""


@dataclass(frozen=True)
class EndedSlice:
    """`tokens`: of its micro-batch; `seconds`: from its launch, or the end of the slice before, to its own end, `at`."""

    decision: Train
    kind: MicroStep
    micro_steps: int
    tokens: int
    seconds: float
    at: float


@dataclass
class _Slice:
    decision: Train
    kind: MicroStep
    micro_steps: int
    tokens: int
    began: float
    done: Future[None]
    ended: float | None = None


class SlicesInFlight:
    """Slices end in the order of their launch. Used on the event loop; ends are noted on any thread."""

    def __init__(self, mark: Mark | None, clock: Callable[[], float], changed: Callable[[], None]) -> None:
        """`mark`: None where slices and steps take turns, so that none is ever in flight. `clock` gives seconds; `changed` is
        called, on any thread, when a slice has ended."""
        self._mark, self._clock, self._changed = mark, clock, changed
        self._slices: deque[_Slice] = deque()
        self._since_step, self._last_end = False, 0.0

    @property
    def takes_turns(self) -> bool:
        """A slice has ended when its launch returns."""
        return self._mark is None

    def view(self) -> InFlight:
        return InFlight(len(self._slices), self._since_step)

    def launched(self, decision: Train, kind: MicroStep, micro_steps: int, tokens: int, began: float) -> None:
        """A slice was launched: `micro_steps` micro-steps that began with one of this kind, in a micro-batch of `tokens` tokens."""
        if self._mark is None:
            return
        launched = _Slice(decision, kind, micro_steps, tokens, began, self._mark())
        self._slices.append(launched)
        # The device was idle for results, which take the host little time: the next slice need not wait for a step.
        self._since_step = self._since_step or kind is not MicroStep.RESULT

        def end(_: Future[None]) -> None:
            launched.ended = self._clock()
            self._changed()

        launched.done.add_done_callback(end)

    def step_begins(self) -> None:
        """A generation step is about to be launched."""
        self._since_step = False

    def take_ended(self) -> list[EndedSlice]:
        """Those that have ended since the last call. Raises `EngineFault` if the device has failed."""
        found = []
        while self._slices and (end := self._slices[0].ended) is not None:
            ended = self._slices.popleft()
            if (error := ended.done.exception()) is not None:
                raise EngineFault("the GPU does not work any more") from error
            seconds = max(0.0, end - max(ended.began, self._last_end))
            found.append(EndedSlice(ended.decision, ended.kind, ended.micro_steps, ended.tokens, seconds, end))
            self._last_end = end
        return found
