"""What rank 0 knows of the memory of the other ranks' GPUs."""

from __future__ import annotations

from coserve.engine.ranks.executor import FollowersMemory
from tests.support.following import Following


def never(tokens: int) -> object:
    raise AssertionError(tokens)


def test_the_last_answer_counts_and_nobody_waits_for_the_next() -> None:
    outside = [700, 500, 900, 800, 800]
    following = Following(never, outside=lambda: outside.pop(0))  # type: ignore[arg-type]
    memory = FollowersMemory(following.followers)
    try:
        found = []
        for _ in range(5):
            found.append(memory.taken())
            following.catch_up()
        assert found == [0, 0, 0, 400, 300], "beyond the least so far"
    finally:
        following.followers.close()
