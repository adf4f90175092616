"""Separates reasoning, which models write between `<think>` and `</think>` before the answer."""

from __future__ import annotations

from typing import Literal

from coserve.api.answers.deltas import held_back

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Parses the text of one choice, incrementally. Line breaks around the reasoning are dropped. `inside`: the prompt
    ends with `<think>`."""

    def __init__(self, *, inside: bool) -> None:
        self._inside = inside
        self._buffer = ""
        self._part: Literal["start", "opened", "reasoning", "closed", "answer"] = "start"

    def push(self, text: str) -> tuple[str, str]:
        """Return what the text adds to the reasoning, and to the answer."""
        self._buffer += text
        reasoning = ""
        if self._part == "start":
            self._start()
        if self._part == "opened":
            self._buffer = self._buffer.lstrip("\n")
            self._part = "reasoning" if self._buffer else "opened"
        if self._part == "reasoning":
            reasoning = self._reasoning()
        if self._part == "closed":
            self._buffer = self._buffer.lstrip("\n")
            self._part = "answer" if self._buffer else "closed"
        if self._part != "answer":
            return reasoning, ""
        answer, self._buffer = self._buffer, ""
        return reasoning, answer

    def flush(self) -> tuple[str, str]:
        """Return what was held back; the text has ended."""
        rest = self._buffer
        if self._part == "start" and not self._inside:
            return "", rest
        return ("" if self._part == "closed" else rest.rstrip("\n")), ""

    def _start(self) -> None:
        rest = self._buffer.lstrip()
        if rest.startswith(OPEN):
            self._part, self._buffer = "opened", rest.removeprefix(OPEN)
        elif not OPEN.startswith(rest):
            self._part = "opened" if self._inside else "answer"

    def _reasoning(self) -> str:
        before, found, after = self._buffer.partition(CLOSE)
        if found:
            self._part, self._buffer = "closed", after
            return before.rstrip("\n")
        kept = before[: len(before) - held_back(before, CLOSE)].rstrip("\n")
        self._buffer = before[len(kept) :]
        return kept
