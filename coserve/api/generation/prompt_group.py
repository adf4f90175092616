"""The prompts of one call reach the engine together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec

from coserve.api.generation.request_state import RequestState
from coserve.core.link import Generate


class PromptGroup:
    """`requests`: one for each prompt of a call. The engine gets all their sequences at once. Only the last sequence
    may be refused for coming late, or give way in a full queue, and only while all of them wait; then all are refused.
    So no answer that has begun is lost."""

    def __init__(self, requests: int = 1) -> None:
        self._missing = requests
        self._states: list[RequestState] = []
        self._messages: list[tuple[RequestState, Generate]] = []
        self._sent = asyncio.Event()

    def join(self, state: RequestState, messages: Sequence[Generate]) -> bool:
        """`messages`: one for each of the request's sequences. Returns whether all are here, so that the caller sends
        them."""
        state.together = self._states
        self._states.append(state)
        self._messages += [(state, message) for message in messages]
        self._missing -= 1
        return self._missing == 0

    async def wait(self) -> None:
        """Until all are sent. A cancelled wait means that the client left: then nothing is sent."""
        try:
            await self._sent.wait()
        except asyncio.CancelledError:
            self._missing += 1
            raise

    def sent(self) -> None:
        """All were sent."""
        self._sent.set()

    def messages(self) -> Iterator[tuple[RequestState, Generate]]:
        """All of them, in the order in which they are to be sent."""
        *others, (state, last) = self._messages
        for one, message in others:
            slo = msgspec.structs.replace(message.slo, shed=False, shed_e2e=False)
            yield one, msgspec.structs.replace(message, slo=slo)
        yield state, msgspec.structs.replace(last, choices=tuple([message.id for _, message in others]))
