"""Tokenisation without blocking the event loop: short texts inline, longer ones in a thread, the longest and all chats
in a helper process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from coserve.core.errors import InvalidRequest, PromptTooLong
from coserve.core.messages import Chat, for_template
from coserve.core.validation import explain
from coserve.data.offload.pool import HelperPool
from coserve.data.offload.protocol import TaskContext
from coserve.data.pretrained.tokenizer import Tokenizer

MAX_INLINE_CHARACTERS = 4096
"""Most characters to tokenise on the event loop."""
MAX_THREAD_CHARACTERS = 64 << 10
"""Most characters to tokenise in a thread: `tokenizers` releases the GIL while it works, but not while it copies the
result."""
MAX_INLINE_IDS = 1024
"""Most token ids to decode on the event loop. Decoding holds the GIL, so a thread would not help."""


class AsyncTokenizer:
    """Token ids of texts and chats; with `keep`, only so many of the last. Raises `PromptTooLong` unless the context
    has room for at least one more token."""

    def __init__(self, tokenizer: Tokenizer, helpers: HelperPool, chats: HelperPool) -> None:
        """`chats`: helper processes that render chats, with templates that may take any time or memory."""
        self._tokenizer, self._helpers, self._chats = tokenizer, helpers, chats
        self.template_read = tokenizer.chat_template is None

    async def encode(
        self, text: str, *, context: int, field: str, add_special: bool = True, keep: int | None = None
    ) -> list[int]:
        if len(text) <= MAX_INLINE_CHARACTERS:
            return _encode(self._tokenizer, text, context, field, add_special, keep)
        if len(text) <= MAX_THREAD_CHARACTERS:
            return await asyncio.to_thread(_encode, self._tokenizer, text, context, field, add_special, keep)
        return await self._helpers.run(encode, text, context, field, add_special, keep)

    async def chat(self, chat: Chat, *, context: int, keep: int | None = None) -> list[int]:
        """Return token ids of a chat by the base's template. Also raises `InvalidRequest`."""
        await self.read_template()
        body = msgspec.json.encode(chat)  # MessagePack has no integers above 64 bits, which tools may contain
        return await self._chats.run(encode_chat, body, context, keep)

    async def read_template(self) -> None:
        """Compile the base's chat template and find its end of turn, in a helper process that then renders chats.
        Raises `InvalidRequest`, `HelperLost`."""
        if not self.template_read:
            self._tokenizer.end_of_turn_id = await self._chats.run(find_end_of_turn)
            self.template_read = True

    async def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        if len(ids) <= MAX_INLINE_IDS:
            return self._tokenizer.decode(ids, skip_special=skip_special)
        return await self._helpers.run(decode, list(ids), skip_special)


def decode(context: TaskContext, ids: list[int], skip_special: bool) -> str:
    """Helper task: return the text of token ids."""
    return context.tokenizer.decode(ids, skip_special=skip_special)


def encode(context: TaskContext, text: str, limit: int, field: str, add_special: bool, keep: int | None) -> list[int]:
    """Helper task: return the token ids of a text. `limit`: the base's context length in tokens; `field`: the request
    field that `PromptTooLong` names."""
    return _encode(context.tokenizer, text, limit, field, add_special, keep)


def _encode(tokenizer: Tokenizer, text: str, limit: int, field: str, add_special: bool, keep: int | None) -> list[int]:
    ids = tokenizer.encode(text, add_special=add_special)
    return _checked(last_tokens(ids, keep, tokenizer.prepended * add_special), limit, field)


def last_tokens(ids: list[int], keep: int | None, begin: int = 0) -> list[int]:
    """Return at most `keep` token ids: the first `begin`, which are special, and the last; all if it is None."""
    return ids if keep is None or len(ids) <= keep else ids[:begin] + ids[len(ids) - max(0, keep - begin) :]


def encode_chat(context: TaskContext, chat: bytes, limit: int, keep: int | None) -> list[int]:
    """Helper task: return the token ids of a `Chat`, which is JSON. `limit`: the base's context length in tokens."""
    try:
        found = msgspec.json.decode(chat, type=Chat)
    except RecursionError:
        raise InvalidRequest("expected messages and tools of moderate depth", field="messages") from None
    except msgspec.ValidationError as error:  # a limit that the dialect does not check
        wrong = explain(error, msgspec.json.decode(chat), Chat)
        wrong.field = "chat_template_kwargs" if wrong.field == "options" else wrong.field
        raise wrong from None
    return _checked(last_tokens(chat_ids(context.tokenizer, found), keep), limit, "messages")


def chat_ids(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """Return token ids by the base's template. Raises `InvalidRequest`."""
    render = partial(
        tokenizer.chat,
        tools=chat.tools,
        options=chat.options,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final=chat.continue_final_message,
    )
    messages = for_template(chat.messages, malformed="text")
    try:
        return render(messages)
    except InvalidRequest:  # some templates read arguments as objects only
        if (changed := for_template(chat.messages, malformed="entry")) == messages:
            raise
        return render(changed)


def find_end_of_turn(context: TaskContext) -> int | None:
    """Helper task: return the id of the end-of-turn token, if there is one."""
    return context.tokenizer.find_end_of_turn()


def _checked(ids: list[int], context: int, field: str) -> list[int]:
    check_tokens(len(ids), context, field)
    return ids


def check_tokens(length: int, context: int, field: str) -> None:
    """Raise `PromptTooLong` for a prompt that fills the context."""
    if length >= context:
        message = f"expected at most {context - 1} tokens, got {length}"
        raise PromptTooLong(message, field=field, context=context, length=length)
