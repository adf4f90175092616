"""How fast a full batch takes requests while others wait. Pure: no torch, no IO, no clock."""

from __future__ import annotations

MEMORY = 32
"""Admissions after which one counts 1/e of a new one."""


class Pace:
    """Seconds for each unit of what is admitted, over the latest admissions."""

    def __init__(self) -> None:
        self._seconds = self._units = 0.0

    def add(self, seconds: float, units: float, count: int) -> None:
        """`count` requests, `units` together, were admitted `seconds` after the ones before."""
        fading = (1 - 1 / MEMORY) ** count
        self._seconds, self._units = fading * self._seconds + seconds, fading * self._units + units

    def after(self, seconds: float, units: float) -> float:
        """As `each`, if so many units were admitted now, after `seconds`."""
        return (self._seconds + seconds) / (self._units + units)

    @property
    def each(self) -> float:
        """0: not known."""
        return self._seconds / self._units if self._units else 0.0
