"""A client's training session in the API process: its calls in flight, and how it ends."""

from __future__ import annotations

import asyncio
from collections import deque

from coserve.core.access.principal import principal
from coserve.core.errors import CoserveError, error_from_code
from coserve.core.link.jobs import CallDone, CallFailed
from coserve.core.training.schemas import SessionSpec
from coserve.core.types import AdapterRef


class ClientSession:
    """One session. `spec.id` is its id in the engine, too."""

    def __init__(self, spec: SessionSpec, name: str) -> None:
        """`name`: the user's, in messages."""
        self.spec, self.name, self.project = spec, name, principal().project
        self.order = asyncio.Lock()
        """Held while a call is sent, and while a state is loaded: calls wait in the order in which they came."""
        self.opened = asyncio.get_running_loop().create_future()
        """Done when the engine has the session in memory; raises why it has not."""
        self.cancelled: asyncio.Future[None] | None = None
        """Done when the engine has dropped the session, which is being reopened with a saved state; None otherwise."""
        self.ended: CoserveError | None = None
        """The error that ended it; None: it takes calls."""
        self.waits: str | None = None
        """Reason why it waits to be opened; None: it does not."""
        self.saved: str | None = None
        """The last saved state, as the user knows it."""
        self.samplers = deque[AdapterRef]()
        """Adapters in the engine's memory alone, oldest first."""
        self.used = 0.0
        """Monotonic time in seconds of the client's last call or heartbeat."""
        self._calls: dict[int, asyncio.Future[CallDone]] = {}
        self._number = 0

    def begin(self) -> tuple[int, asyncio.Future[CallDone]]:
        """Return the next call's number and its answer."""
        self._number += 1
        answer = self._calls[self._number] = asyncio.get_running_loop().create_future()
        return self._number, answer

    @property
    def busy(self) -> bool:
        """Whether it is being opened, or a call is in flight."""
        return not self.opened.done() or bool(self._calls)

    async def idle(self) -> None:
        """Wait until no call is in flight."""
        if self._calls:
            await asyncio.wait(self._calls.values())

    def answered(self, message: CallDone | CallFailed) -> None:
        answer = self._calls.pop(message.number, None)
        if answer is None or answer.done():
            return
        if isinstance(message, CallFailed):
            fail(answer, error_from_code(message.code, message.message))
        else:
            answer.set_result(message)

    def end(self, error: CoserveError) -> None:
        """Fail all calls in flight and later ones."""
        self.ended = self.ended or error
        for future in (*self._calls.values(), self.opened):
            if not future.done():
                fail(future, self.ended)
        self._calls.clear()
        if self.cancelled is not None and not self.cancelled.done():
            self.cancelled.set_result(None)


def fail(future: asyncio.Future[CallDone], error: CoserveError) -> None:
    """End a future with an error that nobody may be waiting for."""
    future.set_exception(error)
    future.exception()  # marks it as retrieved
