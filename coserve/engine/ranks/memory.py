"""Memory readings of the other ranks' GPUs, for admission on rank 0."""

from __future__ import annotations

from coserve.engine.ranks.commands import ReadDevice
from coserve.engine.ranks.followers import Answers, Followers


class FollowersMemory:
    """Polls the followers' memory without waiting: each answers once it has executed earlier commands."""

    def __init__(self, followers: Followers) -> None:
        self._followers, self._taken = followers, 0
        self._asked: Answers | None = None

    def taken(self) -> int:
        """Return the last answers, and ask again: the most bytes that any rank's GPU has lost since the start outside
        of that rank's allocator. Raises `RankLost`."""
        if self._asked is not None and self._asked.complete:
            self._taken, self._asked = max(self._asked.wait()), None
        if self._asked is None:
            self._asked = self._followers.ask(ReadDevice())
        return self._taken
