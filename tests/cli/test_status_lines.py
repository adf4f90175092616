"""The lines that `coserve serve` prints about its status."""

from __future__ import annotations

from coserve.cli.status_lines import REPEAT, StatusLines
from coserve.health import Warming


def test_one_line_for_each_status_and_a_few_for_a_warm_up() -> None:
    said: list[str] = []
    now = 0.0
    lines = StatusLines("127.0.0.1", said.append, lambda: now)
    lines.show(8000, "starting", None)
    lines.show(8000, "warming", Warming(done=0, total=0, seconds_left=None))
    for done in range(3):
        lines.show(8000, "warming", Warming(done=done, total=9, seconds_left=None))
    now += REPEAT
    lines.show(8000, "warming", Warming(done=5, total=9, seconds_left=41.7))
    lines.show(8000, "ready", None)
    lines.show(8000, "ready", None)
    assert said == [
        "coserve listens on http://127.0.0.1:8000",
        "warming 0/9",
        "warming 5/9, about 42 s left",
        "ready",
    ]


def test_a_restart_is_told_once_and_has_a_warm_up_of_its_own() -> None:
    said: list[str] = []
    lines = StatusLines("::1", said.append, lambda: 0.0)
    for _ in range(2):
        lines.show(1, "warming", Warming(done=1, total=2, seconds_left=3.0))
        lines.show(1, "ready", None)
        lines.show(1, "starting", None)
        lines.show(1, "starting", None)
    assert said == 2 * [
        "coserve listens on http://[::1]:1",
        "warming 1/2, about 3 s left",
        "ready",
        "starting again; requests get 503 until then",
    ]


def test_a_start_that_waits_for_kernels_shows_how_far_they_are() -> None:
    said: list[str] = []
    now = 0.0
    lines = StatusLines("127.0.0.1", said.append, lambda: now)
    lines.show(8000, "starting", None)
    for done in range(3):
        lines.show(8000, "starting", Warming(done=done, total=9, seconds_left=None))
    now += REPEAT
    lines.show(8000, "starting", Warming(done=5, total=9, seconds_left=41.7))
    lines.show(8000, "warming", Warming(done=6, total=9, seconds_left=30.0))
    assert said == [
        "starting: warming 0/9",
        "starting: warming 5/9, about 42 s left",
        "coserve listens on http://127.0.0.1:8000",
        "warming 6/9, about 30 s left",
    ]
