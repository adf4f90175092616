"""Training slices that the engine launches without waiting for them. Events signal their ends; generation steps overlap
them or run between them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from coserve.core.errors import EngineFault
from coserve.core.training.micro_step import MicroStep
from coserve.queues.policy import InFlight, Train
from coserve.queues.shapes import StepKind
from coserve.queues.slices import EndedSlice, LaunchedSlice

Mark = Callable[[], Future[None]]
"""Returns a future that is done, on any thread, once the device has finished the work queued on the stream before the
call. Its exception is a device failure. Futures complete in call order."""
Between = Callable[[], AbstractContextManager[object]]
"""Context that orders generation launched inside after all training launched before, and before all training launched
later."""


@dataclass(frozen=True)
class Marks:
    """How ends of device work are signalled. `training`: marks of training's stream, if slices are launched without
    waiting for them, and overlap generation or run `between` its steps; None: a slice has ended when the trainer
    returns. `steps`: marks of generation's stream, if the engine does not wait for steps; None: it does."""

    training: Mark | None = None
    between: Between = nullcontext
    steps: Mark | None = None


TURNS = Marks()
"""Marks without overlap: slices and steps alternate."""


@dataclass
class _End:
    """When some work ended; None: not yet. Separate from the work, so that waiting for it does not keep all earlier
    work in memory."""

    at: float | None = None


@dataclass
class _Work:
    """Work on training's stream: a slice, or a step between two slices (`slice` is None)."""

    slice: LaunchedSlice | None
    began: float
    seconds: float
    """Predicted duration."""
    done: Future[None]
    end: _End = field(default_factory=_End)

    @property
    def ended(self) -> float | None:
        return self.end.at


@dataclass
class LaunchedStep:
    """A launched generation step. `between` slices: it begins when the work before it, `after`, has ended (None: there
    is none)."""

    between: bool = False
    after: _End | None = None
    expected: float = 0.0
    """Predicted time of its end; 0: unknown."""
    done: Future[None] | None = None
    """Done when the step has ended on the device; None: its end is not observed."""
    kind: StepKind = "decode"
    began: float = 0.0
    end: _End = field(default_factory=_End)
    """When it ended, if that is observed."""

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended."""
        return self.done is not None and self.done.done()


class SlicesInFlight:
    """All launched slices, which end in launch order. Used on the event loop; ends are noted on any thread."""

    def __init__(self, marks: Marks, clock: Callable[[], float], changed: Callable[[], None]) -> None:
        """`clock` returns seconds; `changed` is called, on any thread, when a slice or a step has ended."""
        self._mark, self._between, self._mark_step = marks.training, marks.between, marks.steps
        self._clock, self._changed = clock, changed
        self._works: deque[_Work] = deque()
        self._since_step, self._until = False, 0.0
        self._last_end, self._last_slice = 0.0, (0.0, 0.0)
        """End of the last work that `take_ended` removed; begin and end of the last such slice."""
        self._overlapped: deque[LaunchedStep] = deque()
        """Steps that overlap slices whose end has not been taken."""
        self._last_step: LaunchedStep | None = None
        """The last step launched without `between`."""

    @property
    def takes_turns(self) -> bool:
        """Whether slices and steps alternate: a slice has ended when its launch returns."""
        return self._mark is None

    def view(self) -> InFlight:
        return InFlight(sum(work.slice is not None for work in self._works), self._since_step, self._until)

    def launched(
        self, decision: Train, kind: MicroStep, micro_steps: int, tokens: int, began: float, seconds: float = 0.0
    ) -> None:
        """Record a launched slice: `micro_steps` micro-steps, beginning with one of `kind`, in a micro-batch of
        `tokens` tokens, predicted to take `seconds`."""
        # A slice that reads results takes the host little time, while the device was idle: the next one need not wait
        # for a step.
        self._since_step = self._since_step or kind is not MicroStep.RESULT
        if self._mark is None:
            return
        step = self._last_step
        if step is not None and step.end.at is None and not (self._overlapped and self._overlapped[-1] is step):
            self._overlapped.append(step)
        self._give(LaunchedSlice(decision, kind, micro_steps, tokens), began, seconds, self._mark())

    @contextmanager
    def step(self, began: float, seconds: float, *, between: bool, kind: StepKind = "decode") -> Iterator[LaunchedStep]:
        """Context in which a generation step is launched, at `began`, that is predicted to take `seconds`. `between`:
        it runs between two slices instead of overlapping them."""
        self._since_step = False
        step = LaunchedStep(kind=kind)
        if self._mark_step is None:
            yield step
            return
        if between:
            step = LaunchedStep(kind=kind, between=True, after=self._works[-1].end if self._works else None)
        with self._between() if between else nullcontext():
            yield step
        step.began, step.done = began, self._mark_step()

        step.done.add_done_callback(partial(self._note_end, step.end))
        if between:
            self._give(None, began, seconds, step.done)
        else:
            self._last_step = step
            if any(work.slice is not None for work in self._works):
                self._overlapped.append(step)
        step.expected = self._until if between else began + seconds

    def _give(self, slice: LaunchedSlice | None, began: float, seconds: float, done: Future[None]) -> None:
        self._until = max(began, self._until) + seconds
        work = _Work(slice, began, seconds, done)
        self._works.append(work)
        done.add_done_callback(partial(self._note_end, work.end))

    def _note_end(self, end: _End, _: Future[None]) -> None:
        end.at = self._clock()
        self._changed()

    def began(self, step: LaunchedStep, since: float) -> float:
        """When the device could begin a step whose time counts from `since`."""
        ended = None if step.after is None else step.after.at
        return since if ended is None else max(since, ended)

    def overlapped(self, step: LaunchedStep, since: float) -> bool:
        """Whether the device computed training during a step that was launched at `since` and has just been
        collected."""
        if step.between:
            return False
        stop = math.inf if step.end.at is None else step.end.at
        return any(began < stop and end > since for began, end in self._computed())

    def _computed(self) -> Iterator[tuple[float, float]]:
        """Yield (begin, end) of slices on the device: the last that `take_ended` returned, and those since; an infinite
        end: still running."""
        yield self._last_slice
        before = self._last_end
        for work in self._works:
            began, end = max(work.began, before), math.inf if work.ended is None else work.ended
            if work.slice is not None:
                yield began, end
            if work.ended is None:
                return  # later work has not begun
            before = end

    def take_ended(self) -> list[EndedSlice]:
        """Return the slices that have ended since the last call. Raises `EngineFault` if the device has failed."""
        found = []
        while self._works and (end := self._works[0].ended) is not None:
            ended = self._works.popleft()
            if (error := ended.done.exception()) is not None:
                raise EngineFault("the GPU does not work any more") from error
            if (own := ended.slice) is not None:
                began = max(ended.began, self._last_end)
                overlapped, seconds = self._overlap_in(began, end), max(0.0, end - began)
                self._last_slice = began, end
                found.append(EndedSlice(own.decision, own.kind, own.micro_steps, own.tokens, seconds, end, *overlapped))
            self._last_end = self._until = end
            for work in self._works:
                self._until = max(work.began, self._until) + work.seconds
        return found

    def _overlap_in(self, began: float, end: float) -> tuple[float, StepKind | None]:
        """Seconds of a slice that overlapped steps, and the steps' kind. Later slices begin at its end. Steps do not
        overlap each other."""
        while self._overlapped and (ended := self._overlapped[0].end.at) is not None and ended <= began:
            self._overlapped.popleft()
        found, free, kinds = 0.0, began, set[StepKind]()
        for step in self._overlapped:
            stop = end if step.end.at is None else min(end, step.end.at)
            if (seconds := stop - max(free, step.began)) > 0:
                found += seconds
                kinds.add(step.kind)
            free = max(free, stop)
        return found, kinds.pop() if len(kinds) == 1 else None
