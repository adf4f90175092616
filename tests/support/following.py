"""A follower in a thread of the tests' process, with a base of its own, and what a test asks it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Self

from coserve.core.link.channel import Channel
from coserve.engine.ranks.commands import Answer, AnyCommand, BuildEngine, MeasurePool, command_decoder
from coserve.engine.ranks.follower import Follower, FollowerParts
from coserve.engine.ranks.followers import Followers
from coserve.engine.ranks.progress import Progress


class Following:
    """Rank 0's end, and one follower that executes what is sent there; a context."""

    def __init__(
        self,
        build: Callable[[int], FollowerParts],
        start_thread: Callable[[], None] = lambda: None,
        outside: Callable[[], int] = lambda: 0,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.followers = Followers([ours], Progress())
        commands = Channel[Answer, AnyCommand](theirs, command_decoder())
        self.follower = Follower(
            commands,
            Progress(),
            measure_pool=lambda: 64,
            build=build,
            jobs=2,
            start_thread=start_thread,
            outside=outside,
        )
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, args=(commands,))
        self._thread.start()

    def __enter__(self) -> Self:
        self.followers.ask(BuildEngine(tokens=0)).wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.followers.close()
        self._thread.join(60)
        if self.error is not None:
            raise self.error

    def catch_up(self) -> None:
        """Wait until the follower has executed what was sent until now."""
        self.followers.ask(MeasurePool()).wait()

    def _follow(self, commands: Channel[Answer, AnyCommand]) -> None:
        try:
            self.follower.run()
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            self.error = error
        finally:
            commands.close()
