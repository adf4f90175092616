"""How much work something is, whatever the machine is busy with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def lines_of(work: Callable[[], object]) -> int:
    """Lines of Python that it runs."""
    lines = 0

    def traced(frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        nonlocal lines
        lines += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines
