"""The grammar that a request's text must follow, as plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]
CallStart = tuple[str, ...]
"""The beginning of a tool call: texts one after another, each a special token if the base's tokenizer has it."""


class Grammar(msgspec.Struct, frozen=True):
    """A grammar. Its `text` is, by `kind`, a JSON schema, a regular expression, a JSON list of texts, or a grammar in
    Lark's or GBNF's syntax."""

    kind: GrammarKind
    text: str
    calls: tuple[CallStart, ...] = ()
    """With a JSON schema: how tool calls begin. The request's text may begin so instead, and go on as it likes."""
