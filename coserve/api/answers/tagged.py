"""Reads tool calls that are written with tags, an argument for each, while their text comes."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import msgspec

from coserve.api.answers.call_reader import MalformedCall, Reader
from coserve.api.answers.deltas import Collector
from coserve.api.answers.json_calls import CLOSE, HermesParser
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


ARGUMENT, END = "<parameter=", "</function>"


class QwenXmlReader(TaggedReader):
    """Reads a call as Qwen3-Coder's, Qwen3.5's and their successors' models write it:
    `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`. A line break after the opening
    and before the closing tag of an argument is not part of its value."""

    def _steps(self) -> Steps[None]:
        yield from one_of("<function=")
        name, _ = yield from until(">", most=MAX_NAME)
        self._found(name)
        while (yield from one_of(ARGUMENT, END)) == ARGUMENT:
            key, _ = yield from until(">", most=MAX_NAME)
            value, _ = yield from until("</parameter>")
            self._argument(key, value.removeprefix("\n").removesuffix("\n"))
        self._end()


class QwenXmlParser(HermesParser):
    """Finds such calls anywhere in the text; a missing `</tool_call>` is forgiven."""

    def _reader(self) -> Reader:
        return QwenXmlReader(self._collector, self._schemas)


KEY = "<arg_key>"


class GlmReader(TaggedReader):
    """Reads a call as GLM-4.5's models and their successors write it, to its closing tag:
    `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with or without line breaks
    between."""

    def _steps(self) -> Steps[None]:
        name, tag = yield from until(KEY, CLOSE, most=MAX_NAME)
        self._found(name)
        while tag == KEY:
            key, _ = yield from until("</arg_key>", most=MAX_NAME)
            yield from one_of("<arg_value>")
            value, _ = yield from until("</arg_value>")
            self._argument(key, value)
            tag = yield from one_of(KEY, CLOSE)
        self._end()


class GlmParser(HermesParser):
    """Finds such calls anywhere in the text; `GlmReader` reads `</tool_call>` itself."""

    def _reader(self) -> Reader:
        return GlmReader(self._collector, self._schemas)

    def _ended(self, named: bool) -> None:
        pass
