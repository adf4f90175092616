"""Responses that later requests continue by `previous_response_id`, in memory only."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from coserve.api.http.json_blocks import encode_json
from coserve.api.openai.responses.schemas import (
    InputItem,
    MessageItem,
    OutputItem,
    OutputText,
    Response,
    StoredItem,
)
from coserve.core.access.principal import principal
from coserve.core.errors import NotFound

MAX_BYTES = 256 << 20
"""Most bytes of stored responses; beyond it the least recently used ones are forgotten."""
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class _Stored(NamedTuple):
    project: str
    response: bytes
    items: bytes
    """JSON of the conversation's items, the response's output last."""
    inputs: int
    """Number of the items before the output."""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """The stored responses of all projects, each with its whole conversation, so that earlier ones may be deleted."""

    def __init__(self, most_bytes: int = MAX_BYTES) -> None:
        self._stored = OrderedDict[str, _Stored]()  # least recently used first
        self._most_bytes, self._bytes = most_bytes, 0

    def add(self, response: Response, inputs: Sequence[StoredItem]) -> None:
        """Store a response, unless it is too large. `inputs`: all items before its output, also those of the previous
        responses."""
        items = msgspec.json.encode([*inputs, *map(_of_output, response.output)])
        stored = _Stored(principal().project, b"".join(encode_json(response)), items, len(inputs))
        if stored.size > self._most_bytes:
            return
        self._stored[response.id] = stored
        self._bytes += stored.size
        while self._bytes > self._most_bytes:
            self._bytes -= self._stored.popitem(last=False)[1].size

    def get(self, id: str) -> bytes:
        """Return a response's JSON. Raises `NotFound`, also for one of another project."""
        return self._find(id).response

    def inputs(self, id: str) -> list[StoredItem]:
        """Return the items before a response's output, oldest first. Raises `NotFound`."""
        stored = self._find(id)
        return msgspec.json.decode(stored.items, type=list[StoredItem])[: stored.inputs]

    def conversation(self, id: str) -> list[StoredItem]:
        """Return the items that come before the input of the next response. Raises `NotFound`."""
        return msgspec.json.decode(self._find(id, "previous_response_id").items, type=list[StoredItem])

    def remove(self, id: str) -> None:
        """Raises `NotFound`."""
        self._bytes -= self._find(id).size
        del self._stored[id]

    def _find(self, id: str, field: str = "id") -> _Stored:
        stored = self._stored.get(id)
        if stored is None or not principal().sees(stored.project):
            why = "it was not stored, was deleted or dropped for later ones, or the daemon was restarted"
            raise NotFound(f"no response {id[:80]!r}: {why}", field=field)
        self._stored.move_to_end(id)
        return stored


def stored_items(given: str | Sequence[InputItem]) -> list[StoredItem]:
    """Return the items of a request's `input` as lists of input items show them: with ids, texts as parts."""
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    return [_of_input(item) for item in items]


def _of_input(item: InputItem) -> StoredItem:
    fields = msgspec.structs.asdict(item)
    if not isinstance(item.id, str) or not item.id:
        fields["id"] = f"{_PREFIXES[item.type]}_{secrets.token_hex(16)}"
    if item.type == "message" and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [{"type": part, "text": item.content}]
    return StoredItem(**fields)


def _of_output(item: OutputItem) -> StoredItem:
    """Leave out log-probabilities, which may be many."""
    if isinstance(item, MessageItem):
        item = msgspec.structs.replace(item, content=[OutputText(part.text) for part in item.content])
    return msgspec.convert(msgspec.to_builtins(item), StoredItem)
