"""Steps and slices in flight: seconds of a slice beside steps, and what is kept of steps that have ended."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future

import pytest

from coserve.core.training.micro_step import MicroStep
from coserve.engine.spatial.slices_in_flight import TURNS, Marks, SlicesInFlight
from coserve.queues.policy import InFlight, Train


class Device:
    """Marks are done when the test says so, at its time."""

    def __init__(self) -> None:
        self.now, self.marks = 0.0, list[Future[None]]()
        self.flight = SlicesInFlight(Marks(self.mark, steps=self.mark), lambda: self.now, lambda: None)

    def mark(self) -> Future[None]:
        self.marks.append(Future())
        return self.marks[-1]

    def end(self, which: int, at: float) -> None:
        self.now = at
        self.marks[which].set_result(None)


@pytest.mark.parametrize("between", [False, True])
def test_nothing_is_kept_of_steps_while_no_slice_is_in_flight(between: bool) -> None:
    device, steps = Device(), list[weakref.ref[object]]()
    for number in range(4):
        with device.flight.step(float(number), 0.5, between=between) as step:
            pass
        device.end(number, number + 0.5)
        device.flight.take_ended()
        steps.append(weakref.ref(step))
    del step
    device.marks.clear()
    gc.collect()
    assert [found() for found in steps[:-1]] == [None] * 3


def test_a_late_slice_is_late_once() -> None:
    """Two of 10 s each; the second is launched when the first is late by 20 s, which ends 5 s later."""
    device = Device()
    device.flight.launched(Train("j", 1), MicroStep.FORWARD, 1, 64, 0.0, 10.0)
    device.now = 30.0
    device.flight.launched(Train("j", 1), MicroStep.FORWARD, 1, 64, 30.0, 10.0)
    device.end(0, 35.0)
    device.flight.take_ended()
    assert device.flight.view().until == 45.0
    device.end(1, 44.0)
    device.flight.take_ended()
    assert device.flight.view().until == 44.0


@pytest.mark.parametrize("first", ["step", "slice"])
def test_seconds_of_a_slice_beside_steps(first: str) -> None:
    """A slice from 0 to 10 s and a step from 2 to 5, or a step under way until 5 when a slice begins at 2 and ends at
    10."""
    device = Device()
    if first == "slice":
        device.flight.launched(Train("j", 1), MicroStep.FORWARD, 1, 64, 0.0)
    with device.flight.step(2.0 if first == "slice" else 0.0, 3.0, between=False, kind="prefill"):
        pass
    if first == "step":
        device.flight.launched(Train("j", 1), MicroStep.FORWARD, 1, 64, 2.0)
    device.end(1 if first == "slice" else 0, 5.0)
    device.end(0 if first == "slice" else 1, 10.0)
    (ended,) = device.flight.take_ended()
    assert ended.seconds == (10.0 if first == "slice" else 8.0)
    assert (ended.overlapped, ended.step_kind) == (3.0, "prefill")


def test_whether_a_slice_was_launched_after_the_last_step_is_known_where_they_take_turns() -> None:
    flight = SlicesInFlight(TURNS, lambda: 0.0, lambda: None)
    for kind, seen in ((MicroStep.RESULT, False), (MicroStep.FORWARD, True), (MicroStep.RESULT, True)):
        flight.launched(Train("j", 1), kind, 1, 64, 0.0)
        assert flight.view() == InFlight(0, seen)
    with flight.step(0.0, 0.1, between=False):
        assert flight.view() == InFlight()


def slice_at(device: Device, began: float) -> None:
    device.flight.launched(Train("j", 1), MicroStep.FORWARD, 1, 64, began, 1.0)


def test_a_step_beside_a_slice_that_has_ended_meanwhile_was_beside_training() -> None:
    device = Device()
    slice_at(device, 0.0)
    with device.flight.step(1.0, 2.0, between=False) as step:
        pass
    device.end(0, 2.0)
    device.flight.take_ended()
    device.end(1, 3.0)
    assert device.flight.overlapped(step, 1.0)
    assert not device.flight.overlapped(step, 2.0), "the device began the step when the slice had ended"


def test_a_step_before_which_and_beside_which_nothing_was_trained_was_not_beside_training() -> None:
    """After it comes a step between slices, then a slice, which waits for that one."""
    device = Device()
    with device.flight.step(0.0, 1.0, between=True):
        pass
    device.end(0, 1.0)
    device.flight.take_ended()
    with device.flight.step(0.5, 2.0, between=False) as step:
        pass
    with device.flight.step(1.5, 2.0, between=True):
        pass
    slice_at(device, 1.6)
    device.end(1, 2.0)
    assert not device.flight.overlapped(step, 0.5)
    device.end(2, 3.0)
    assert not device.flight.overlapped(step, 0.5), "the slice began when the step had ended"


def test_a_step_beside_the_second_slice_of_two_was_beside_training() -> None:
    device = Device()
    slice_at(device, 0.0)
    slice_at(device, 0.0)
    with device.flight.step(0.5, 2.0, between=False) as step:
        pass
    device.end(0, 1.0)
    device.flight.take_ended()
    device.end(2, 2.0)
    assert device.flight.overlapped(step, 1.5)


def test_a_step_between_slices_begins_when_the_one_before_it_has_ended() -> None:
    device = Device()
    slice_at(device, 0.0)
    with device.flight.step(1.0, 2.0, between=True) as step:
        pass
    device.end(0, 4.0)
    assert device.flight.began(step, 1.0) == 4.0
    assert device.flight.began(step, 5.0) == 5.0
    assert not device.flight.overlapped(step, 4.0)
