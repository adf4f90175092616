"""Prompts of one call wait for each other here, to reach the engine together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec

from coserve.api.generation.request_state import RequestState
from coserve.link import Generate


class Departure:
    """Of so many requests with the same targets. The last of their sequences alone may be refused for coming late or give way in a full queue, and only while all wait,
    and all go with it: nobody loses an answer that has begun."""

    def __init__(self, requests: int = 1) -> None:
        self._missing = requests
        self._states: list[RequestState] = []
        self._messages: list[tuple[RequestState, Generate]] = []
        self._gone = asyncio.Event()

    def join(self, state: RequestState, messages: Sequence[Generate]) -> bool:
        """`messages`: one for each of the request's sequences. Returns whether all are here, so that the caller sends them."""
        state.together = self._states
        self._states.append(state)
        self._messages += [(state, message) for message in messages]
        self._missing -= 1
        return self._missing == 0

    async def wait(self) -> None:
        """For the others, and until all are sent. If a request leaves instead, none is."""
        try:
            await self._gone.wait()
        except asyncio.CancelledError:
            self._missing += 1
            raise

    def done(self) -> None:
        """All were sent."""
        self._gone.set()

    def messages(self) -> Iterator[tuple[RequestState, Generate]]:
        """All of them, in the order in which they are to be sent."""
        *others, (state, last) = self._messages
        for one, message in others:
            slo = msgspec.structs.replace(message.slo, shed=False, shed_e2e=False)
            yield one, msgspec.structs.replace(message, slo=slo)
        yield state, msgspec.structs.replace(last, choices=tuple([message.id for _, message in others]))
