"""What the engine says of one request, until the request's handler takes it."""

from __future__ import annotations

import asyncio
from collections import deque

from coserve.link import MAX_PROMPT_LOGPROBS, Admitted, RequestFailed, Tokens
from coserve.logprobs import PackedLogprobs

MAX_MERGED = MAX_PROMPT_LOGPROBS
"""Tokens, or positions of a prompt, that are made into text in one turn of the event loop."""

EngineOutput = Admitted | Tokens | RequestFailed


class OutputQueue:
    """In order; tokens that pile up behind a slow reader come out together, so that a message costs less the more there are."""

    def __init__(self) -> None:
        self._messages: deque[EngineOutput] = deque()
        self._came = asyncio.Event()

    def put(self, message: EngineOutput) -> None:
        self._messages.append(message)
        self._came.set()

    async def get(self) -> EngineOutput:
        """The next message, joined with the ones right behind it that go on with the same sequence, up to `MAX_MERGED` entries.

        Others have a turn of the event loop between two messages.
        """
        if self._messages:
            await asyncio.sleep(0)
        while not self._messages:
            self._came.clear()
            await self._came.wait()
        message = self._messages.popleft()
        if not isinstance(message, Tokens):
            return message
        parts, size = [message], _size(message)
        while (
            size < MAX_MERGED and parts[-1].finished is None and self._messages and self._messages[0].id == message.id
        ):
            behind = self._messages[0]
            if not isinstance(behind, Tokens) or (size := size + _size(behind)) > MAX_MERGED:
                break
            parts.append(behind)
            self._messages.popleft()
        return message if len(parts) == 1 else _joined(parts)


def _size(message: Tokens) -> int:
    return len(message.tokens) + len(message.prompt_logprobs)


def _joined(parts: list[Tokens]) -> Tokens:
    return Tokens(
        id=parts[0].id,
        tokens=tuple(token for part in parts for token in part.tokens),
        logprobs=PackedLogprobs.joined(part.logprobs for part in parts),
        prompt_logprobs=PackedLogprobs.joined(part.prompt_logprobs for part in parts),
        finished=parts[-1].finished,
    )
