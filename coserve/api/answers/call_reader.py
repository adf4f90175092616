"""Reads one tool call, a JSON object with a name and arguments, while its text comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator

import msgspec

from coserve.api.answers.deltas import Collector

_Steps = Generator[None, str, str]
"""A parser: is sent one character at a time, and returns the first one that it does not consume."""
_IGNORED = ("id", "type")
"""Keys of a call whose values are skipped."""


class MalformedCall(Exception):
    pass


class Reader(ABC):
    """Reads one call; `ended` tells when it is complete."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self.named = False
        """Whether its name is known: then it is a call, whatever follows."""
        self._text: list[str] = []
        self.ended = False
        self._running = self._steps()
        next(self._running)

    @property
    def text(self) -> str:
        """All characters read; empty once they are known to be a call."""
        return "" if self.named else "".join(self._text)

    def push(self, text: str) -> str:
        """Read characters until the call ends. Returns the unread rest; if the call is malformed, it begins with the
        wrong character."""
        for index, char in enumerate(text):
            try:
                self._running.send(char)
            except StopIteration:
                self.ended = True
                return text[index + 1 :]
            except MalformedCall:
                self.ended = True
                return text[index:]
            if not self.named:
                self._text.append(char)
        return ""

    @abstractmethod
    def _steps(self) -> Generator[None, str, object]:
        """Take one character at a time, to the call's end; raise `MalformedCall`."""


class CallReader(Reader):
    """Reads a call in JSON. `name`: the call's name, if the text has its arguments only.

    The arguments are passed on as the model wrote them, without being checked: a client has to expect invalid JSON, as
    with OpenAI.
    """

    def __init__(self, collector: Collector, name: str | None = None) -> None:
        self._name = name
        self._held: list[str] = []
        """Arguments that came before the name."""
        super().__init__(collector)

    def _steps(self) -> Generator[None, str, object]:
        return self._call() if self._name is None else self._arguments_only(self._name)

    def _begin(self, name: str) -> None:
        if not name or self.named:
            raise MalformedCall
        self.named = True
        self._collector.begin_call(name)
        self._add("".join(self._held))

    def _add(self, text: str) -> None:
        if self.named:
            self._collector.add_arguments(text)
        else:
            self._held.append(text)

    def _call(self) -> Generator[None, str, None]:
        given = False
        char = yield from _space((yield))
        _expect(char, "{")
        char = yield from _space((yield))
        while True:
            _expect(char, '"')
            key = yield from _string()
            char = yield from _space((yield))
            _expect(char, ":")
            char = yield from _space((yield))
            if key == "name":
                _expect(char, '"')
                self._begin((yield from _string()))
                char = yield
            elif key in ("arguments", "parameters") and not given:
                given = True
                char = yield from self._arguments(char)
            elif key in _IGNORED or self.named:
                char = yield from _value(char, lambda text: None)
            else:
                raise MalformedCall
            char = yield from _space(char)
            if char == "}":
                break
            _expect(char, ",")
            char = yield from _space((yield))
        if not self.named:
            raise MalformedCall
        if not given:
            self._add("{}")

    def _arguments_only(self, name: str) -> Generator[None, str, None]:
        self._begin(name)
        char = yield
        _expect(char, "{")
        yield from _nested(char, self._add)

    def _arguments(self, char: str) -> _Steps:
        """Read an object, a text with its JSON, or null."""
        if char == "{":
            yield from _nested(char, self._add)
            return (yield)
        if char == '"':
            text = yield from _string()
            self._add(text.strip() or "{}")
            return (yield)
        if char != "n":
            raise MalformedCall
        after = yield from _value(char, lambda text: None)
        self._add("{}")
        return after


def _expect(char: str, expected: str) -> None:
    if char != expected:
        raise MalformedCall


def _space(char: str) -> _Steps:
    while char.isspace():
        char = yield
    return char


def _string() -> Generator[None, str, str]:
    """Read a JSON string after its opening quote, closing quote included; return it decoded."""
    raw: list[str] = []
    yield from _quoted(raw.append)
    try:
        return msgspec.json.decode('"' + "".join(raw), type=str)
    except msgspec.DecodeError:
        raise MalformedCall from None


def _quoted(add: Callable[[str], None]) -> Generator[None, str, None]:
    """Read to the closing quote."""
    escaped = False
    while True:
        char = yield
        add(char)
        if char == '"' and not escaped:
            return
        escaped = char == "\\" and not escaped


def _nested(char: str, add: Callable[[str], None]) -> Generator[None, str, None]:
    """Read an object or a list to the bracket that closes it."""
    depth = 0
    while True:
        add(char)
        if char == '"':
            yield from _quoted(add)
        depth += (char in "{[") - (char in "}]")
        if depth == 0:
            return
        char = yield


def _value(char: str, add: Callable[[str], None]) -> _Steps:
    if char == '"':
        add(char)
        yield from _quoted(add)
        return (yield)
    if char in "{[":
        yield from _nested(char, add)
        return (yield)
    while not (char in ",}]" or char.isspace()):
        add(char)
        char = yield
    return char
