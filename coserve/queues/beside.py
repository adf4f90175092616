"""What training loses to generation steps beside it, and which steps are measured in turn. Pure: no torch, no IO, no
clock."""

from __future__ import annotations

from collections import Counter, deque

from coserve.queues.shapes import StepKind

FIRST_GUESS = 0.8
ENOUGH, WINDOW = 16, 256
"""Slices that the share is computed from."""
TRIAL_AFTER, TRIALS = 150, 3
"""After so many steps of a kind beside training, so many are computed in turn, to measure again what one in turn
takes."""


class SpeedBeside:
    """How fast training is while steps of one kind run beside it, as a share of its speed alone.

    Learns from slices whose time alone is known: of the seconds that a step ran beside one, training used as many as
    the slice did not take longer.
    """

    def __init__(self) -> None:
        self._slices: deque[tuple[float, float]] = deque()
        """Seconds beside steps, and how many of them training used."""
        self._beside = self._used = 0.0
        """Their sums."""

    def add(self, seconds: float, beside: float, alone: float) -> None:
        """A slice took `seconds`, `beside` of them while a step ran, and would take `alone` without steps."""
        if beside <= 0:
            return
        one = beside, alone - (seconds - beside)
        for (longer, used), sign in (
            (one, 1),
            *([(self._slices.popleft(), -1)] if len(self._slices) == WINDOW else []),
        ):
            self._beside += sign * longer
            self._used += sign * used
        self._slices.append(one)

    @property
    def measured(self) -> bool:
        return len(self._slices) >= ENOUGH

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return min(max(self._used / self._beside, 0.0), 1.0) if self.measured else FIRST_GUESS


class Trials:
    """Which kinds of steps are computed in turn though they run beside training: which of the two costs less changes
    with the load."""

    def __init__(self) -> None:
        self._beside, self._left = Counter[StepKind](), Counter[StepKind]()

    def ran(self, kind: StepKind, *, beside: bool) -> None:
        """A step of this kind was measured."""
        if not beside:
            self._beside[kind], self._left[kind] = 0, max(0, self._left[kind] - 1)
            return
        self._beside[kind] += 1
        if self._beside[kind] == TRIAL_AFTER:
            self._beside[kind], self._left[kind] = 0, TRIALS

    def due(self, kind: StepKind) -> bool:
        return self._left[kind] > 0
