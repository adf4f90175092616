"""Reads one tool call that is written with tags, an argument for each, while its text comes."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import msgspec

from coserve.api.answers.call_reader import MalformedCall, Reader
from coserve.api.answers.deltas import Collector
from coserve.api.answers.typed_arguments import Schemas, typed

T = TypeVar("T")
Steps = Generator[None, str, T]
MAX_NAME = 256
"""Characters of the longest name of a tool or an argument."""


class TaggedReader(Reader):
    """Reads one call. The text counts as a call once its first argument, or its end, was read. Each argument is passed
    on as a whole, in JSON (see `typed`). A text that ends within a call gives the arguments so far, without the closing
    bracket."""

    def __init__(self, collector: Collector, schemas: Schemas) -> None:
        self._schemas = schemas
        self._schema: dict[str, Any] = {}
        self._name = ""
        super().__init__(collector)

    def _found(self, name: str) -> None:
        """Set the call's name. Raises `MalformedCall` for a text that is no name."""
        self._name = name.strip()
        if len(self._name.split()) != 1 or "<" in self._name:
            raise MalformedCall
        self._schema = self._schemas.get(self._name, {})

    def _argument(self, name: str, value: str) -> None:
        before, name = ", " if self.named else "{", name.strip()
        self._begin()
        self._collector.add_arguments(f"{before}{_json(name)}: {_json(typed(value, self._schema, name))}")

    def _end(self) -> None:
        after = "}" if self.named else "{}"
        self._begin()
        self._collector.add_arguments(after)

    def _begin(self) -> None:
        if not self.named:
            self.named = True
            self._collector.begin_call(self._name)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def one_of(*tags: str) -> Steps[str]:
    """Read one of the tags, after white space; return it."""
    read = yield
    while read.isspace():
        read = yield
    while read not in tags:
        if not any(tag.startswith(read) for tag in tags):
            raise MalformedCall
        read += yield
    return read


def until(*tags: str, most: int | None = None) -> Steps[tuple[str, str]]:
    """Read to the first of the tags; return the text before it, of at most `most` characters, and the tag."""
    ends, longest, read = {tag[-1] for tag in tags}, max(map(len, tags)), list[str]()
    while True:
        char = yield
        read.append(char)
        if char in ends:
            end = "".join(read[-longest:])
            for tag in tags:
                if end.endswith(tag):
                    return "".join(read[: len(read) - len(tag)]), tag
        if most is not None and len(read) > most + longest:
            raise MalformedCall
