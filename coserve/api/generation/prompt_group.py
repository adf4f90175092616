"""Groups the prompts of one call, so that they reach the engine together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec

from coserve.api.generation.request_state import RequestState
from coserve.core.link.generation import Generate


class PromptGroup:
    """The prompts of one call. `requests`: number of prompts, one request each.

    The engine gets all their sequences at once. Only the last sequence can be shed, for its deadline or for room in a
    full queue, and only while all sequences wait; then all are shed. So no answer that has begun is lost.
    """

    def __init__(self, requests: int = 1) -> None:
        self._missing = requests
        self._states: list[RequestState] = []
        self._messages: list[tuple[RequestState, Generate]] = []
        self._sent = asyncio.Event()

    def join(self, state: RequestState, messages: Sequence[Generate]) -> bool:
        """Add a request. `messages`: one for each of its sequences. Returns whether the group is complete; then the
        caller sends it."""
        state.together = self._states
        self._states.append(state)
        self._messages += [(state, message) for message in messages]
        self._missing -= 1
        return self._missing == 0

    async def wait(self) -> None:
        """Wait until the group is sent. A cancelled wait means that the client left; then nothing is sent."""
        try:
            await self._sent.wait()
        except asyncio.CancelledError:
            self._missing += 1
            raise

    def sent(self) -> None:
        self._sent.set()

    def messages(self) -> Iterator[tuple[RequestState, Generate]]:
        """Yield the messages of all requests in sending order; only the last can be shed."""
        *others, (state, last) = self._messages
        for one, message in others:
            slo = msgspec.structs.replace(message.slo, shed=False, shed_e2e=False)
            yield one, msgspec.structs.replace(message, slo=slo)
        yield state, msgspec.structs.replace(last, choices=tuple([message.id for _, message in others]))
