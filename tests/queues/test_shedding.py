"""How long a request waits behind a full batch, from how fast it has taken requests."""

from __future__ import annotations

import pytest

from coserve.engine.reception import QueueSpeed


def measured(gap: float, count: int = 4) -> QueueSpeed:
    """A full batch has taken a request each `gap` seconds, the last one at `(count - 1) * gap`, and others wait."""
    speed = QueueSpeed()
    speed.began_to_wait()
    for number in range(count):
        speed.admitted(1, gap * number, others_wait=True)
    return speed


def test_the_wait_grows_with_those_ahead() -> None:
    speed = measured(0.5)
    assert speed.gap == pytest.approx(0.5)
    assert [speed.wait(ahead, 1.5, full=True) for ahead in (0, 1, 9)] == [
        pytest.approx(0.25),
        pytest.approx(0.75),
        pytest.approx(4.75),
    ]


def test_how_long_the_batch_has_taken_nobody_tells_its_speed() -> None:
    """Also before anybody who waited was admitted."""
    assert measured(0.5).wait(0, 9.5, full=True) > 0.5
    unknown = measured(0.0, count=1)
    assert unknown.gap == 0
    assert unknown.wait(1, 4.0, full=True) == pytest.approx(6.0)
    assert unknown.wait(1, 4.0, full=False) == 0, "it is not the batch that they wait for"


def test_the_speed_is_that_of_the_requests_that_wait_now() -> None:
    """Long answers gave a place each 5 s; then the queue was empty."""
    speed = measured(5.0)
    speed.began_to_wait()
    assert speed.gap == 0


def test_what_a_policy_holds_back_tells_no_speed() -> None:
    speed = QueueSpeed()
    speed.admitted(0, 0.0, others_wait=False)
    speed.admitted(1, 0.05, others_wait=False)
    assert speed.gap == 0


def test_idle_time_is_no_time_between_admissions() -> None:
    speed = QueueSpeed()
    for now in (0.0, 10.0, 20.0):
        speed.began_to_wait()
        speed.admitted(1, now, others_wait=False)
    assert speed.gap == 0


def test_later_admissions_count_more() -> None:
    speed = measured(1.0)
    for number in range(200):
        speed.admitted(1, 3.0 + 0.1 * (number + 1), others_wait=True)
    assert speed.gap == pytest.approx(0.1, rel=0.02)
