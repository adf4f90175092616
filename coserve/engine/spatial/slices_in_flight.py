"""Training slices that are only launched: their end is an event, and generation steps run beside or between them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from coserve.core.errors import EngineFault
from coserve.core.types import MicroStep
from coserve.queues.policy import InFlight, Train
from coserve.queues.shapes import StepKind

Mark = Callable[[], Future[None]]
"""The future is done, on any thread, once the device has computed all that its stream was given before the call. Its
exception is the device's failure. Futures are done in the order of the calls."""
Between = Callable[[], AbstractContextManager[object]]
"""The device computes what generation launches inside after all training that was launched before, and before what is
launched later."""


@dataclass(frozen=True)
class Marks:
    """How the ends of work are noted. `training`: slices are only launched, and run beside generation, or `between` its
    steps; None: a slice has ended when the trainer returns. `steps`: of generation's stream, where the ends of steps
    are events, too; None: the engine waits for them."""

    training: Mark | None = None
    between: Between = nullcontext
    steps: Mark | None = None


TURNS = Marks()
"""Slices and steps take turns."""


@dataclass(frozen=True)
class EndedSlice:
    """`tokens`: of its micro-batch; `seconds`: from its launch, or the end of the work before, to its own end, `at`;
    `beside`: those in which a generation step ran beside it."""

    decision: Train
    kind: MicroStep
    micro_steps: int
    tokens: int
    seconds: float
    at: float
    beside: float = 0.0
    beside_kind: StepKind | None = None
    """Of the steps beside it; None: there were none, or of both kinds."""


@dataclass(frozen=True)
class _Slice:
    decision: Train
    kind: MicroStep
    micro_steps: int
    tokens: int


@dataclass
class _End:
    """When some work ended; None: not yet. Apart from the work, so that what waits for it does not keep all work before
    in memory."""

    at: float | None = None


@dataclass
class _Work:
    """What training's stream was given: a slice, or a step between two (None)."""

    slice: _Slice | None
    began: float
    seconds: float
    """As predicted."""
    expected: float
    """When it will have ended, as predicted."""
    done: Future[None]
    end: _End = field(default_factory=_End)

    @property
    def ended(self) -> float | None:
        return self.end.at


@dataclass
class LaunchedStep:
    """A generation step. `between` slices: it begins when `after`, the work before it, has ended (None: there is
    none)."""

    between: bool = False
    after: _End | None = None
    expected: float = 0.0
    """When it will have ended, as predicted; 0: not known."""
    done: Future[None] | None = None
    """None: its end is no event."""
    kind: StepKind = "decode"
    began: float = 0.0
    end: _End = field(default_factory=_End)
    """When its end came, if that is an event."""

    @property
    def ended(self) -> bool:
        """Its end was an event, and has come."""
        return self.done is not None and self.done.done()


class SlicesInFlight:
    """Slices end in the order of their launch. Used on the event loop; ends are noted on any thread."""

    def __init__(self, marks: Marks, clock: Callable[[], float], changed: Callable[[], None]) -> None:
        """`clock` gives seconds; `changed` is called, on any thread, when a slice or a step has ended."""
        self._mark, self._between, self._mark_step = marks.training, marks.between, marks.steps
        self._clock, self._changed = clock, changed
        self._works: deque[_Work] = deque()
        self._since_step, self._until = False, 0.0
        self._last_end, self._last_slice = 0.0, (0.0, 0.0)
        """Of the last work that `take_ended` removed its end, of the last slice its begin and end."""
        self._beside: deque[LaunchedStep] = deque()
        """Steps that ran beside slices, as far as slices may end that ran beside them."""
        self._last_step: LaunchedStep | None = None
        """The last one that was launched beside slices, or while there were none."""

    @property
    def takes_turns(self) -> bool:
        """A slice has ended when its launch returns."""
        return self._mark is None

    def view(self) -> InFlight:
        return InFlight(sum(work.slice is not None for work in self._works), self._since_step, self._until)

    def launched(
        self, decision: Train, kind: MicroStep, micro_steps: int, tokens: int, began: float, seconds: float = 0.0
    ) -> None:
        """A slice was launched: `micro_steps` micro-steps that began with one of this kind, in a micro-batch of
        `tokens` tokens, and take `seconds` as predicted."""
        # The device was idle for results, which take the host little time: the next slice need not wait for a step.
        self._since_step = self._since_step or kind is not MicroStep.RESULT
        if self._mark is None:
            return
        step = self._last_step
        if step is not None and step.end.at is None and not (self._beside and self._beside[-1] is step):
            self._beside.append(step)
        self._give(_Slice(decision, kind, micro_steps, tokens), began, seconds, self._mark())

    @contextmanager
    def step(self, began: float, seconds: float, *, between: bool, kind: StepKind = "decode") -> Iterator[LaunchedStep]:
        """A generation step is launched inside, which takes `seconds` as predicted."""
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
                self._beside.append(step)
        step.expected = self._until if between else began + seconds

    def _give(self, slice: _Slice | None, began: float, seconds: float, done: Future[None]) -> None:
        self._until = max(began, self._until) + seconds
        work = _Work(slice, began, seconds, self._until, done)
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
        """Whether the device computed training beside a step that was launched at `since` and has just been
        collected."""
        if step.between:
            return False
        stop = math.inf if step.end.at is None else step.end.at
        return any(began < stop and end > since for began, end in self._computed())

    def _computed(self) -> Iterator[tuple[float, float]]:
        """From when until when the device computed slices: the last one that `take_ended` returned, and those since;
        infinity: it still does."""
        yield self._last_slice
        before = self._last_end
        for work in self._works:
            began, end = max(work.began, before), math.inf if work.ended is None else work.ended
            if work.slice is not None:
                yield began, end
            if work.ended is None:
                return  # what comes after it has not begun
            before = end

    def take_ended(self) -> list[EndedSlice]:
        """Those that have ended since the last call. Raises `EngineFault` if the device has failed."""
        found = []
        while self._works and (end := self._works[0].ended) is not None:
            ended = self._works.popleft()
            if (error := ended.done.exception()) is not None:
                raise EngineFault("the GPU does not work any more") from error
            if (own := ended.slice) is not None:
                began = max(ended.began, self._last_end)
                beside, seconds = self._beside_in(began, end), max(0.0, end - began)
                self._last_slice = began, end
                found.append(EndedSlice(own.decision, own.kind, own.micro_steps, own.tokens, seconds, end, *beside))
            self._last_end = self._until = end
            for work in self._works:
                work.expected = self._until = max(work.began, self._until) + work.seconds
        return found

    def _beside_in(self, began: float, end: float) -> tuple[float, StepKind | None]:
        """Seconds of a slice in which a step ran beside it, and the steps' kind; later slices begin at its end. Steps
        follow one another."""
        while self._beside and (ended := self._beside[0].end.at) is not None and ended <= began:
            self._beside.popleft()
        found, free, kinds = 0.0, began, set[StepKind]()
        for step in self._beside:
            stop = end if step.end.at is None else min(end, step.end.at)
            if (seconds := stop - max(free, step.began)) > 0:
                found += seconds
                kinds.add(step.kind)
            free = max(free, stop)
        return found, kinds.pop() if len(kinds) == 1 else None
