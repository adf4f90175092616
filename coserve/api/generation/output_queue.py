"""A request's queue of engine messages that its handler has not read yet."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import chain

from coserve.core.link.generation import MAX_PROMPT_LOGPROBS, Admitted, RequestFailed, Tokens
from coserve.core.logprobs import PackedLogprobs

MAX_MERGED = MAX_PROMPT_LOGPROBS
"""Most tokens and prompt positions in one merged message, which becomes text in one event-loop iteration."""

UNMERGED = 16
"""Queued messages that are kept unmerged."""

EngineOutput = Admitted | Tokens | RequestFailed


class OutputQueue:
    """FIFO queue. Consecutive `Tokens` messages of one sequence are merged, so a slow reader pays less for each.

    A reader that stops is disconnected after the write deadline (`EventStream`), so at most the whole response is
    queued. Beyond `UNMERGED` messages, new ones are merged on arrival: about ten bytes per token instead of hundreds.
    """

    def __init__(self) -> None:
        self._messages: deque[EngineOutput] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: EngineOutput) -> None:
        last = self._messages[-1] if len(self._messages) >= UNMERGED else None
        if isinstance(last, Tokens) and isinstance(message, Tokens) and _join(last, message):
            self._messages[-1] = _merged([last, message])
        else:
            self._messages.append(message)
        self._arrived.set()

    async def get(self) -> EngineOutput:
        """Return the next message, merged with the following ones of its sequence up to `MAX_MERGED` entries.

        Yields to the event loop between two messages.
        """
        if self._messages:
            await asyncio.sleep(0)
        while not self._messages:
            self._arrived.clear()
            await self._arrived.wait()
        message = self._messages.popleft()
        if not isinstance(message, Tokens):
            return message
        parts, size = [message], _size(message)
        while (
            size < MAX_MERGED and parts[-1].finished is None and self._messages and self._messages[0].id == message.id
        ):
            following = self._messages[0]
            if not isinstance(following, Tokens) or (size := size + _size(following)) > MAX_MERGED:
                break
            parts.append(following)
            self._messages.popleft()
        return message if len(parts) == 1 else _merged(parts)


def _size(message: Tokens) -> int:
    return len(message.tokens) + len(message.prompt_logprobs)


def _join(last: Tokens, message: Tokens) -> bool:
    """Return whether the two may become one message."""
    return last.id == message.id and last.finished is None and _size(last) + _size(message) <= MAX_MERGED


def _merged(parts: list[Tokens]) -> Tokens:
    return Tokens(
        id=parts[0].id,
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        logprobs=PackedLogprobs.joined(part.logprobs for part in parts),
        prompt_logprobs=PackedLogprobs.joined(part.prompt_logprobs for part in parts),
        finished=parts[-1].finished,
        ends_in_text=parts[-1].ends_in_text,
    )
