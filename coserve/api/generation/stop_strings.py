"""Finds stop strings in generated text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that ends first in a growing text. No part of a stop string is released before that.

    Text that may still become a stop string is held back, so the result does not depend on how the text is split into
    pushes. The cost per character depends neither on the text so far nor on the strings' lengths (Knuth, Morris and
    Pratt 1977).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Matcher(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text to release, and the stop string once one is complete; push nothing after that."""
        if not self._stops:
            return text, None
        held = len(self._held)
        whole = self._held + text
        for end, character in enumerate(text, start=held + 1):
            found = [matcher.stop for matcher in self._stops if matcher.step(character)]
            if found:
                stop = max(found, key=len)
                self._held = ""
                return whole[: end - len(stop)], stop
        free = len(whole) - max(matcher.matched for matcher in self._stops)
        self._held = whole[free:]
        return whole[:free], None

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """One stop string. `matched`: length of its longest prefix that the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop, self.matched = stop, 0
        self._failure = [0] * len(stop)
        """For each prefix: the length of its longest proper prefix that is also its suffix."""
        for end in range(1, len(stop)):
            self._failure[end] = self._next(self._failure[end - 1], stop[end])

    def _next(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._failure[matched - 1]
        return matched + (self.stop[matched] == character)

    def step(self, character: str) -> bool:
        """Read the next character; true once the stop string is complete. Read nothing after that."""
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.stop)
