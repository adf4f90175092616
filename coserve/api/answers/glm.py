"""Tool calls as GLM-4.5's models and their successors write them:
`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with or without line breaks between."""

from __future__ import annotations

from coserve.api.answers.call_reader import Reader
from coserve.api.answers.hermes import CLOSE, HermesParser
from coserve.api.answers.tagged_reader import MAX_NAME, Steps, TaggedReader, one_of, until

KEY = "<arg_key>"


class GlmReader(TaggedReader):
    """Reads to the closing tag of the call."""

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
    def _reader(self) -> Reader:
        return GlmReader(self._collector, self._schemas)

    def _ended(self, named: bool) -> None:
        pass
