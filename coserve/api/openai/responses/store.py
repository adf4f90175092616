"""Responses that later requests continue by `previous_response_id`, in memory only."""

from __future__ import annotations

import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from coserve.api.http.json_blocks import encode_json
from coserve.api.openai.responses.schemas import InputItem, MessageItem, OutputItem, OutputText, Response, StoredItem
from coserve.core.access.principal import principal
from coserve.core.errors import InvalidRequest, NotFound

MAX_BYTES = 256 << 20
"""Most bytes of stored responses, of all projects together."""
MAX_REQUEST_BYTES = 4 << 20
"""Most bytes of stored items, as JSON, that one request continues or refers to: they are decoded on the event loop."""
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
    "compaction": "cmp",
}
_ENTRY_BYTES = 360
"""Memory that an item's entry in the index takes."""
_GONE = "it was not stored, was deleted or dropped for later ones, or the daemon was restarted"


class EncodedItem(NamedTuple):
    """An item of a stored response, as JSON. A list decodes those of its page alone."""

    id: str
    json: bytes


@dataclass(slots=True, eq=False)
class _Stored:
    response: bytes
    items: tuple[EncodedItem, ...]
    """Its own items, the output last. Those before them are its parents'."""
    places: dict[str, int]
    """Index in `items` of each id, the first one that has it."""
    inputs: int
    """Number of its own items before the output."""
    parent: _Stored | None
    """The previous response of the same project."""
    holders: int = 1
    """Stored responses that continue it, and 1 if it is stored itself. Its items are forgotten at 0."""
    size: int = field(init=False)
    """Memory of its own items, bytes."""

    def __post_init__(self) -> None:
        self.size = _bytes_of(self.items) + len(self.items) * _ENTRY_BYTES

    def chain(self) -> Iterator[_Stored]:
        """Yield the responses of its conversation, newest first."""
        each: _Stored | None = self
        while each is not None:
            yield each
            each = each.parent

    def conversation(self) -> list[EncodedItem]:
        return [item for each in reversed(list(self.chain())) for item in each.items]


@dataclass
class _Project:
    stored: OrderedDict[str, _Stored] = field(default_factory=OrderedDict)
    """By id, least recently used first."""
    items: defaultdict[str, list[_Stored]] = field(default_factory=lambda: defaultdict(list))
    """Responses that have an item, by its id."""
    bytes: int = 0

    def add(self, id: str, new: _Stored) -> None:
        self.stored[id] = new
        self.bytes += len(new.response) + new.size
        for item in new.places:
            self.items[item].append(new)
        if new.parent is not None:
            new.parent.holders += 1

    def remove(self, id: str) -> None:
        removed = self.stored.pop(id)
        self.bytes -= len(removed.response)
        for each in removed.chain():
            each.holders -= 1
            if each.holders:
                break
            self.bytes -= each.size
            for item in each.places:
                self.items[item].remove(each)
                if not self.items[item]:
                    del self.items[item]


class ResponseStore:
    """The stored responses of all projects.

    Each has its own items and refers to its parent, so a conversation takes memory in proportion to its length. Items
    of a parent that was deleted or dropped stay until no stored response continues it.

    Where room is missing, the project with the most bytes loses the responses that it used least recently: a project
    that has no more than an equal part of the room loses none to others."""

    def __init__(self, most_bytes: int = MAX_BYTES) -> None:
        self._projects = defaultdict[str, _Project](_Project)
        self._most_bytes = most_bytes

    def add(self, response: Response, before: Sequence[StoredItem], inputs: Sequence[StoredItem]) -> None:
        """Store a response, unless its conversation is too large. `before`: items of the previous responses, which are
        copied if the previous one is another project's, or was deleted or dropped meanwhile; `inputs`: its own items
        before its output."""
        own = self._projects[principal().project]
        parent = own.stored.get(response.previous_response_id or "")
        given = inputs if parent else [*before, *inputs]
        items = [*given, *map(_of_output, response.output)]
        places = {item.id: place for place, item in reversed(list(enumerate(items)))}
        encode = msgspec.json.Encoder().encode
        encoded = tuple(EncodedItem(item.id, encode(item)) for item in items)
        new = _Stored(b"".join(encode_json(response)), encoded, places, len(given), parent)
        if len(new.response) + sum(each.size for each in new.chain()) > self._most_bytes:
            return
        own.add(response.id, new)
        while sum(project.bytes for project in self._projects.values()) > self._most_bytes:
            largest = max(self._projects.values(), key=lambda project: project.bytes)
            largest.remove(next(iter(largest.stored)))

    def get(self, id: str) -> bytes:
        """Return a response's JSON. Raises `NotFound`, also for one of another project."""
        return self._find(id)[1].response

    def inputs(self, id: str) -> list[EncodedItem]:
        """Return the items before a response's output, oldest first. Raises `NotFound`."""
        found = self._find(id)[1]
        before = [] if found.parent is None else found.parent.conversation()
        return [*before, *found.items[: found.inputs]]

    def conversation(self, id: str) -> list[StoredItem]:
        """Return the items that come before the input of the next response. Raises `NotFound`, and `InvalidRequest` for
        more than `MAX_REQUEST_BYTES`."""
        field = "previous_response_id"
        items = self._find(id, field)[1].conversation()
        if _bytes_of(items) > MAX_REQUEST_BYTES:
            raise _too_large(field)
        return decoded(items)

    def items(self, ids: Mapping[int, str]) -> list[StoredItem]:
        """Return items of stored responses or their conversations. `ids`: each by its place in the request's `input`.
        Raises `NotFound` for that field, and `InvalidRequest` for more than `MAX_REQUEST_BYTES`."""
        seen = [project.items for name, project in self._projects.items() if principal().sees(name)]
        found: list[EncodedItem] = []
        left = MAX_REQUEST_BYTES
        for place, id in ids.items():
            owner = next((items[id][0] for items in seen if id in items), None)
            if owner is None:
                raise NotFound(f"no item {id[:80]!r}: {_GONE}", field=f"input[{place}].id")
            found.append(owner.items[owner.places[id]])
            left -= len(found[-1].json)
            if left < 0:
                raise _too_large(f"input[{place}].id")
        return decoded(found)

    def remove(self, id: str) -> None:
        """Raises `NotFound`."""
        self._find(id)[0].remove(id)

    def _find(self, id: str, field: str = "id") -> tuple[_Project, _Stored]:
        for name, project in self._projects.items():
            if id in project.stored and principal().sees(name):
                project.stored.move_to_end(id)
                return project, project.stored[id]
        raise NotFound(f"no response {id[:80]!r}: {_GONE}", field=field)


def _too_large(field: str) -> InvalidRequest:
    return InvalidRequest(f"expected at most {MAX_REQUEST_BYTES} bytes of stored items in one request", field=field)


def _bytes_of(items: Iterable[EncodedItem]) -> int:
    return sum(len(item.json) for item in items)


def decoded(items: Sequence[EncodedItem]) -> list[StoredItem]:
    """Return the items themselves."""
    return msgspec.json.decode(b"[%s]" % b",".join(item.json for item in items), type=list[StoredItem])


def stored_items(given: str | Sequence[InputItem]) -> list[StoredItem]:
    """Return the items of a request's `input` as lists of input items show them: with ids, texts as parts."""
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    new = secrets.token_hex(14)
    return [_of_input(item, f"{new}{place:04x}") for place, item in enumerate(items)]


def _of_input(item: InputItem, new: str) -> StoredItem:
    """Return the item as stored. `new`: the digits of its id if it has none."""
    assert item.type != "item_reference", "references are replaced by their items first"
    content = item.content
    if item.type == "message" and isinstance(content, str):
        content = [{"type": "output_text" if item.role == "assistant" else "input_text", "text": content}]
    return StoredItem(  # as there may be thousands, each field by name: a third of the time
        id=item.id if isinstance(item.id, str) and item.id else f"{_PREFIXES[item.type]}_{new}",
        type=item.type,
        role=item.role,
        content=content,
        call_id=item.call_id,
        name=item.name,
        arguments=item.arguments,
        output=item.output,
        status=item.status,
        summary=item.summary,
        encrypted_content=item.encrypted_content,
    )


def _of_output(item: OutputItem) -> StoredItem:
    """Leave out log-probabilities, which may be many."""
    if isinstance(item, MessageItem):
        item = msgspec.structs.replace(item, content=[OutputText(part.text) for part in item.content])
    return msgspec.convert(msgspec.to_builtins(item), StoredItem)
