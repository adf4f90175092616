"""The token budget of a step: lowered when memory runs out, raised again after a while."""

from __future__ import annotations

PATIENCE = 64
"""Steps until a lowered budget is doubled again. Each further shortage doubles this number, up to `LONGEST`."""
LONGEST = 4096
"""Most steps until a lowered budget is doubled again."""


class StepBudget:
    """Token budget of a step, from 1 to `full`."""

    def __init__(self, full: int) -> None:
        self.full = self.tokens = full
        self._patience = PATIENCE // 2
        self._left = 0
        """Steps until the budget doubles."""

    @property
    def lowered(self) -> bool:
        return self.tokens < self.full

    def lower(self, tried: int) -> None:
        """Memory ran out in a step of `tried` tokens: halve it."""
        self.tokens = max(1, min(self.tokens, tried // 2))
        self._patience = min(LONGEST, 2 * self._patience)
        self._left = self._patience

    def succeeded(self) -> None:
        """A step had enough memory: count it towards raising the budget."""
        if not self.lowered:
            return
        self._left -= 1
        if self._left <= 0:
            self.tokens, self._left = min(self.full, 2 * self.tokens), self._patience
