"""How much generation steps slow training down when both run at once, and when to re-measure steps without overlap.
Pure: no torch, no IO, no clock."""

from __future__ import annotations

from collections import Counter, deque

from coserve.queues.shapes import StepKind

FIRST_GUESS = 0.8
"""The speed until it is measured, as a fraction of the speed without steps."""
ENOUGH, WINDOW = 16, 256
"""Overlapped slices before the speed counts as measured; slices in the window that it is computed from."""
TRIAL_AFTER, TRIALS = 150, 3
"""After `TRIAL_AFTER` overlapped steps of a kind, `TRIALS` steps run without overlap, to re-measure their time."""


class OverlapSpeed:
    """Training speed while steps of one kind run at the same time, as a fraction of its speed without them.

    Learns from slices whose time without steps is known (`alone`). A slice that took `seconds`, of which it overlapped
    steps for `overlapped`, did `alone - (seconds - overlapped)` seconds of its own work during the overlap.
    """

    def __init__(self) -> None:
        self._slices: deque[tuple[float, float]] = deque()
        """For each slice: seconds overlapped with steps, and seconds of training work done in them."""
        self._overlapped = self._used = 0.0
        """Sums over `_slices`."""

    def add(self, seconds: float, overlapped: float, alone: float) -> None:
        """Add a slice: it took `seconds`, `overlapped` of them with a step; without steps it would take `alone`."""
        if overlapped <= 0:
            return
        one = overlapped, alone - (seconds - overlapped)
        for (longer, used), sign in (
            (one, 1),
            *([(self._slices.popleft(), -1)] if len(self._slices) == WINDOW else []),
        ):
            self._overlapped += sign * longer
            self._used += sign * used
        self._slices.append(one)

    @property
    def measured(self) -> bool:
        return len(self._slices) >= ENOUGH

    @property
    def share(self) -> float:
        """The fraction, between 0 and 1; `FIRST_GUESS` until measured."""
        return min(max(self._used / self._overlapped, 0.0), 1.0) if self.measured else FIRST_GUESS


class Trials:
    """Schedules trials: steps run without overlap although overlap is in use, because whether overlap costs less
    changes with the load."""

    def __init__(self) -> None:
        self._overlapped, self._left = Counter[StepKind](), Counter[StepKind]()

    def ran(self, kind: StepKind, *, overlapped: bool) -> None:
        """Count a measured step of this kind."""
        if not overlapped:
            self._overlapped[kind], self._left[kind] = 0, max(0, self._left[kind] - 1)
            return
        self._overlapped[kind] += 1
        if self._overlapped[kind] == TRIAL_AFTER:
            self._overlapped[kind], self._left[kind] = 0, TRIALS

    def due(self, kind: StepKind) -> bool:
        return self._left[kind] > 0
