"""Tool calls as Qwen3-Coder's, Qwen3.5's and their successors' models write them:
`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

from coserve.api.answers.call_reader import Reader
from coserve.api.answers.hermes import HermesParser
from coserve.api.answers.tagged_reader import MAX_NAME, Steps, TaggedReader, one_of, until

ARGUMENT, END = "<parameter=", "</function>"


class QwenXmlReader(TaggedReader):
    """A line break after the opening and before the closing tag of an argument is not part of its value."""

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
    def _reader(self) -> Reader:
        return QwenXmlReader(self._collector, self._schemas)
