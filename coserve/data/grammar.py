"""Grammars as llguidance reads them, checked without a tokenizer. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import llguidance
import msgspec

from coserve.core.errors import InvalidRequest
from coserve.core.grammar import CallStart, Grammar

SPACE = r"( |\n[ \t]{0,32})?"
"""White space between a JSON text's parts: a space, or a line break with an indentation. With any white space, a model
may write nothing else until its last token."""
MAX_LEXER_STATES = 50_000
"""Bounds the memory of one request's matcher: a state takes one to two kB."""


def limits() -> llguidance.LLParserLimits:
    """Return bounds of a grammar's size, and of the time to compile it and to compute a mask. A grammar that reaches
    one is refused."""
    return llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, max_grammar_size=100_000, verbose_errors=False)


def llguidance_grammar(grammar: Grammar) -> str:
    """Return the grammar as llguidance reads it. Raises `InvalidRequest`."""
    try:
        if grammar.kind == "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": SPACE})
        return llguidance.grammar_from(grammar.kind, grammar.text)
    except ValueError as error:
        raise _wrong(grammar, str(error)) from error


def with_calls(grammar: str, calls: Iterable[CallStart], special: Callable[[str], int | None]) -> str:
    """Return the grammar for a text that may also begin with one of `calls`. `grammar`: a JSON schema's, as
    `llguidance_grammar` returns it; `special`: returns the id of the special token with a text, None if there is none.
    """
    grammars = msgspec.json.decode(grammar)
    (format,) = grammars["grammars"]

    def start_of(part: str) -> str:
        id = special(part)
        return msgspec.json.encode(part).decode() if id is None else f"<[{id}]>"

    starts = " | ".join(" ".join(map(start_of, call)) for call in calls)
    rules = f"start: @format | call\ncall: ({starts}) <[*]>*\n"
    answer = {"name": "answer", "lark_grammar": rules}
    return msgspec.json.encode(grammars | {"grammars": [answer, format | {"name": "format"}]}).decode()


@lru_cache(256)
def check_grammar(grammar: Grammar) -> None:
    """Raise `InvalidRequest` for a grammar that is invalid, too complex, or has parts that cannot be enforced. May take
    tens of milliseconds."""
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        llguidance_grammar(grammar), None, limits=limits()
    )
    if failed:
        raise _wrong(grammar, messages[0])


def plain_reason(reason: str) -> str:
    """Return why a grammar was refused, without llguidance's markers and internal codes."""
    plain = reason.replace("<non-verbose/>", "").strip()[:500]
    return "no text fits it" if plain == "NoExtensionBias" else plain


def _wrong(grammar: Grammar, reason: str) -> InvalidRequest:
    kind = {"json_schema": "JSON schema", "regex": "regular expression"}.get(grammar.kind, grammar.kind)
    return InvalidRequest(f"expected a {kind} that can be enforced, got: {plain_reason(reason)}")
