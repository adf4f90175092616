"""Tokenising for the handlers: short texts here, long ones in a helper process."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import msgspec

from coserve.errors import PromptTooLong
from coserve.offload.pool import HelperPool
from coserve.offload.protocol import TaskContext
from coserve.pretrained.chat import Message
from coserve.pretrained.tokenizer import Tokenizer

AT_ONCE = 4096
"""Characters that are tokenised on the event loop."""
IN_A_THREAD = 64 << 10
"""Characters up to which a thread tokenises: `tokenizers` gives up the interpreter's lock while it works, but the result
is copied with it."""


IDS_AT_ONCE = 1024
"""Token ids that are decoded on the event loop: decoding keeps the lock, so a thread would not help."""


class Encode(msgspec.Struct, frozen=True):
    """`context`: of the base, in tokens; `field`: the request field named in `PromptTooLong`. One of `text` (the body, if null) and `messages`."""

    context: int
    field: str
    add_special: bool = True
    messages: list[dict[str, object]] | None = None


class Decode(msgspec.Struct, frozen=True):
    """The body: token ids as int32."""

    skip_special: bool


class AsyncTokenizer:
    """Token ids of texts and chats that leave room in the context; `PromptTooLong` for others."""

    def __init__(self, tokenizer: Tokenizer, helpers: HelperPool) -> None:
        self._tokenizer, self._helpers = tokenizer, helpers

    async def encode(self, text: str, *, context: int, field: str, add_special: bool = True) -> list[int]:
        if len(text) <= AT_ONCE:
            ids = self._tokenizer.encode(text, add_special=add_special)
        elif len(text) <= IN_A_THREAD:
            ids = await asyncio.to_thread(self._tokenizer.encode, text, add_special=add_special)
        else:
            arguments = Encode(context, field, add_special)
            return _ids(await self._helpers.run(encode, arguments, text.encode()))
        return _checked(ids, context, field)

    async def chat(self, messages: Sequence[Message], *, context: int) -> list[int]:
        """By the base's template. Raises `InvalidRequest` too."""
        if sum(len(str(message.get("content", ""))) for message in messages) <= IN_A_THREAD:
            return _checked(await asyncio.to_thread(self._tokenizer.chat, messages), context, "messages")
        arguments = Encode(context, "messages", messages=[dict(message) for message in messages])
        return _ids(await self._helpers.run(encode, arguments))

    async def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        if len(ids) <= IDS_AT_ONCE:
            return self._tokenizer.decode(ids, skip_special=skip_special)
        return (await self._helpers.run(decode, Decode(skip_special), array("i", ids).tobytes())).decode()


def decode(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """The task: text as UTF-8."""
    asked = msgspec.msgpack.decode(arguments, type=Decode)
    return context.tokenizer.decode(_ids(body), skip_special=asked.skip_special).encode()


def encode(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """The task: token ids as int32."""
    asked = msgspec.msgpack.decode(arguments, type=Encode)
    if asked.messages is None:
        ids = context.tokenizer.encode(body.decode(), add_special=asked.add_special)
    else:
        ids = context.tokenizer.chat(asked.messages)
    return array("i", _checked(ids, asked.context, asked.field)).tobytes()


def _ids(packed: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


def _checked(ids: list[int], context: int, field: str) -> list[int]:
    check_tokens(len(ids), context, field)
    return ids


def check_tokens(length: int, context: int, field: str) -> None:
    """Raises `PromptTooLong` for a prompt that fills the context."""
    if length >= context:
        message = f"expected at most {context - 1} tokens, got {length}"
        raise PromptTooLong(message, field=field, context=context, length=length)
