"""Memory of the other ranks' GPUs, for admission on rank 0."""

from __future__ import annotations

from coserve.engine.ranks.commands import ReadDevice
from coserve.engine.ranks.followers import Answers, Followers


class FollowersMemory:
    """Asks for it without waiting: a follower answers once it has executed what it was sent before."""

    def __init__(self, followers: Followers) -> None:
        self._followers, self._taken = followers, 0
        self._asked: Answers | None = None

    def taken(self) -> int:
        """The most bytes that others than a rank's allocator have taken on its GPU since the start, as the last answers
        say; asks again. Raises `RankLost`."""
        if self._asked is not None and self._asked.complete:
            self._taken, self._asked = max(self._asked.wait()), None
        if self._asked is None:
            self._asked = self._followers.ask(ReadDevice())
        return self._taken
