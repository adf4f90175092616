"""Tokenisation without blocking the event loop: short texts here, longer ones in a thread, the longest in a helper process."""

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

MAX_INLINE_CHARACTERS = 4096
"""Most characters to tokenise on the event loop."""
MAX_THREAD_CHARACTERS = 64 << 10
"""Most characters to tokenise in a thread: `tokenizers` releases the GIL while it works, but not while it copies the
result."""
MAX_INLINE_IDS = 1024
"""Most token ids to decode on the event loop. Decoding holds the GIL, so a thread would not help."""


class EncodeArguments(msgspec.Struct, frozen=True):
    """Arguments of `encode`. `context`: the base's, in tokens; `field`: the request field that `PromptTooLong` names.

    `messages` None: the body is a text.
    """

    context: int
    field: str
    add_special: bool = True
    messages: list[dict[str, object]] | None = None


class DecodeArguments(msgspec.Struct, frozen=True):
    """Arguments of `decode`. The body is token ids as int32."""

    skip_special: bool


class AsyncTokenizer:
    """Token ids of texts and chats. Raises `PromptTooLong` unless at least one token fits after them in the context."""

    def __init__(self, tokenizer: Tokenizer, helpers: HelperPool) -> None:
        self._tokenizer, self._helpers = tokenizer, helpers

    async def encode(self, text: str, *, context: int, field: str, add_special: bool = True) -> list[int]:
        if len(text) <= MAX_INLINE_CHARACTERS:
            ids = self._tokenizer.encode(text, add_special=add_special)
        elif len(text) <= MAX_THREAD_CHARACTERS:
            ids = await asyncio.to_thread(self._tokenizer.encode, text, add_special=add_special)
        else:
            arguments = EncodeArguments(context, field, add_special)
            return _unpack(await self._helpers.run(encode, arguments, text.encode()))
        return _checked(ids, context, field)

    async def chat(self, messages: Sequence[Message], *, context: int) -> list[int]:
        """By the base's template. Raises `InvalidRequest` too."""
        if sum(len(str(message.get("content", ""))) for message in messages) <= MAX_THREAD_CHARACTERS:
            return _checked(await asyncio.to_thread(self._tokenizer.chat, messages), context, "messages")
        arguments = EncodeArguments(context, "messages", messages=[dict(message) for message in messages])
        return _unpack(await self._helpers.run(encode, arguments))

    async def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        if len(ids) <= MAX_INLINE_IDS:
            return self._tokenizer.decode(ids, skip_special=skip_special)
        return (await self._helpers.run(decode, DecodeArguments(skip_special), array("i", ids).tobytes())).decode()


def decode(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Helper task: the text as UTF-8."""
    options = msgspec.msgpack.decode(arguments, type=DecodeArguments)
    return context.tokenizer.decode(_unpack(body), skip_special=options.skip_special).encode()


def encode(context: TaskContext, arguments: bytes, body: bytes) -> bytes:
    """Helper task: token ids as int32."""
    options = msgspec.msgpack.decode(arguments, type=EncodeArguments)
    if options.messages is None:
        ids = context.tokenizer.encode(body.decode(), add_special=options.add_special)
    else:
        ids = context.tokenizer.chat(options.messages)
    return array("i", _checked(ids, options.context, options.field)).tobytes()


def _unpack(packed: bytes) -> list[int]:
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
