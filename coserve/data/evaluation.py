"""Held-out rows as questions, and how answers to them are compared and averaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import re2

from coserve.core.errors import CorpusError, InvalidRequest, MalformedRow
from coserve.core.schemas.generation import PromptLogprob
from coserve.core.schemas.jobs import EvalScore
from coserve.core.types import Wire
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.conversion import as_json_lines
from coserve.data.corpus.rows import ChatRow, CompletionRow, LabelledRow, PreferenceRow, Row, TextRow
from coserve.data.corpus.sources import PieceReader, split_source
from coserve.data.corpus.staging import MEMORY, bounded_memory
from coserve.data.corpus.token_rows import TokensRow
from coserve.data.offload.protocol import TaskContext

Match = Callable[[str, str], bool]
"""Compares a generated text with the expected one."""


class Question(Wire, frozen=True):
    """The fields of a `GenerateRequest` that ask for a row's answer, and that answer; None: the row is a text."""

    source: dict[str, Any]
    answer: str | None


@dataclass(frozen=True)
class RowScore:
    """Scores of one row, summed over its `tokens`. `loss`: negative log-likelihood in nats; `right`: number of tokens
    that the model finds the most likely; `match`: whether the answer matches, None for a text."""

    loss: float
    right: int
    tokens: int
    match: bool | None


def question(row: Row) -> Question:
    """Return a row as a question. The expected answer of a chat is its last message. Raises `MalformedRow`."""
    match row:
        case TextRow():
            return Question({"prompt": row.text}, None)
        case CompletionRow():
            return Question({"prompt": row.prompt}, row.completion)
        case ChatRow():
            *before, last = row.messages
            if last["role"] != "assistant" or not before or not isinstance(last.get("content"), str):
                raise MalformedRow("expected a chat that ends with a text of the assistant", line=row.line)
            messages = [{name: value for name, value in one.items() if name != "weight"} for one in before]
            more: dict[str, Any] = {"tools": list(row.tools)} if row.tools else {}
            if row.options:
                more["chat_template_kwargs"] = row.options
            return Question({"messages": messages, **more}, str(last["content"]))
        case PreferenceRow() | LabelledRow() | TokensRow():
            got = {PreferenceRow: "a pair", LabelledRow: "a label"}.get(type(row), "tokens")
            raise MalformedRow(f"expected rows of texts, prompts and completions, or chats, got {got}", line=row.line)


def read_questions(
    context: TaskContext, source: str, copy: str, columns: dict[str, str], most: int, unpacked: int
) -> list[Question]:
    """Helper task: return the first `most` questions of a file or folder of rows. `copy`: path for a copy as JSON
    Lines; `unpacked`: most bytes of rows in a gzip file. Raises as `as_json_lines`, `split_source` and `PieceReader`,
    and `MalformedRow`, with the line in the source."""
    read, found, lines = Columns(columns), list[Question](), 0
    with bounded_memory(MEMORY):
        for part in split_source(as_json_lines(Path(source), Path(copy), read, context.progress, most=unpacked)):
            piece = PieceReader(part, columns=read)
            try:
                found += [question(row) for row in islice(piece, most - len(found))]
            except CorpusError as error:
                raise error.moved(lines) from error
            lines += piece.lines
            if len(found) == most:
                break
    return found


def matcher(regex: str | None, field: str | None) -> Match:
    """Return how texts are compared: exactly but for white space around them, or by what `regex` finds, or by a field
    of JSON texts. Raises `InvalidRequest`."""
    if regex is not None and field is not None:
        raise InvalidRequest("expected one of regex and json_field, got both", field="regex")
    try:
        parts = partial(_found, _compiled(regex)) if regex is not None else partial(_field, field) if field else None
    except re2.error as error:
        raise InvalidRequest(f"expected a regular expression of RE2, got {regex!r}: {error}", field="regex") from error
    if parts is None:
        return lambda got, expected: got.strip() == expected.strip()
    return lambda got, expected: (value := parts(expected)) is not None and parts(got) == value


def row_score(scored: Sequence[PromptLogprob], match: bool | None) -> RowScore:
    """Return the sums over the tokens that have a log-probability; each entry names the most likely token."""
    tokens = [token for token in scored if token.logprob is not None]
    right = sum(bool(token.top) and token.top[0].token_id == token.token_id for token in tokens)
    return RowScore(-sum(token.logprob or 0.0 for token in tokens), right, len(tokens), match)


def mean_score(rows: Sequence[RowScore]) -> EvalScore:
    """Return the means over the rows' tokens, and over the rows that have answers."""
    tokens, matched = sum(row.tokens for row in rows), [row.match for row in rows if row.match is not None]
    return EvalScore(
        rows=len(rows),
        tokens=tokens,
        loss=sum(row.loss for row in rows) / max(tokens, 1),
        token_accuracy=sum(row.right for row in rows) / max(tokens, 1),
        match=sum(matched) / len(matched) if matched else None,
    )


def _compiled(regex: str) -> re2._Regexp:
    options = re2.Options()
    options.log_errors = False
    return re2.compile(regex, options)


def _found(pattern: re2._Regexp, text: str) -> str | None:
    found = pattern.search(text)
    return None if found is None else found[min(1, pattern.groups)]


def _field(path: str, text: str) -> object:
    """Return a field of a JSON text; None: it has none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
