"""The parts of an answer: text for the user, reasoning, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CallDelta:
    """New text of one tool call. `index`: the call's place in the answer; `name`: in the call's first delta only;
    `arguments`: the next characters of its JSON."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class AnswerDelta:
    """All that a piece of the model's text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    @classmethod
    def joined(cls, deltas: Iterable[AnswerDelta]) -> AnswerDelta:
        """Return the sum of consecutive deltas, with one delta for each call."""
        every = list(deltas)
        calls: dict[int, list[CallDelta]] = {}
        for call in (call for delta in every for call in delta.calls):
            calls.setdefault(call.index, []).append(call)
        return cls(
            "".join(delta.content for delta in every),
            "".join(delta.reasoning for delta in every),
            [
                CallDelta(index, parts[0].name, "".join(part.arguments for part in parts))
                for index, parts in calls.items()
            ],
        )


class Collector:
    """Collects a parser's output until `take`. White space between content and a call is dropped, so it is held back
    until what follows is known."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._space = ""
        self._count = 0

    def add_content(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._content += (self._space, kept)
            self._space = ""
        self._space += text[len(kept) :]

    def begin_call(self, name: str) -> None:
        self._space = ""
        self._calls.append(CallDelta(self._count, name, ""))
        self._count += 1

    def add_arguments(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        self._calls.append(CallDelta(self._count - 1, None, text))

    def take(self) -> AnswerDelta:
        found = AnswerDelta("".join(self._content), calls=AnswerDelta.joined([AnswerDelta(calls=self._calls)]).calls)
        self._content, self._calls = [], []
        return found

    def end(self) -> AnswerDelta:
        """Return the rest. An answer without calls keeps the white space at its end."""
        if not self._count:
            self._content.append(self._space)
        return self.take()


def held_back(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
