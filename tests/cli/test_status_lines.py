"""The lines that `coserve serve` prints about its status."""

from __future__ import annotations

from coserve.cli.status_lines import REPEAT, StatusLines
from coserve.core.health import Warming


def compiling(done: int, seconds_left: float | None = None) -> Warming:
    return Warming(done=done, total=9, seconds_left=seconds_left, what="compiling kernels")


def test_a_start_shows_now_and_then_how_far_it_is_and_ends_ready() -> None:
    said: list[str] = []
    now = 0.0
    lines = StatusLines("127.0.0.1", said.append, lambda: now)
    lines.show(8000, "starting", None)
    for done in range(3):
        lines.show(8000, "starting", compiling(done))
    now += REPEAT
    lines.show(8000, "starting", compiling(5, 41.7))
    for _ in range(2):
        lines.show(8000, "ready", None)
    assert said == [
        "starting: compiling kernels 0/9",
        "starting: compiling kernels 5/9, about 42 s left",
        "coserve listens on http://127.0.0.1:8000",
        "ready",
    ]


def test_a_restart_is_told_once_and_shows_its_own_progress() -> None:
    said: list[str] = []
    lines = StatusLines("::1", said.append, lambda: 0.0)
    for _ in range(2):
        lines.show(1, "starting", compiling(1, 3.0))
        lines.show(1, "ready", None)
        lines.show(1, "starting", None)
    ready = ["starting: compiling kernels 1/9, about 3 s left", "coserve listens on http://[::1]:1", "ready"]
    again = "starting again; requests get 503 until then"
    assert said == [*ready, again, *ready, again]
