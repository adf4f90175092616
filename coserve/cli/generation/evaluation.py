"""The command `coserve eval`: measures an adapter on held-out rows, with the base beside it."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from coserve.cli import common
from coserve.cli.common import DEFAULT_URL, Key, Url
from coserve.client import AsyncClient
from coserve.core.errors import EmptyCorpus, InvalidRequest, MalformedRow
from coserve.core.types import Wire
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.rows import ChatRow, CompletionRow, PreferenceRow, Row, TextRow

AT_ONCE = 16
"""Rows in flight at a time."""
Match = Callable[[str, str], bool]
"""Compares a generated text with the expected one."""


@dataclass(frozen=True)
class Question:
    """The arguments of `AsyncClient.generate` for a row, and the expected answer; None: a text without one."""

    source: dict[str, Any]
    answer: str | None


class Score(Wire, frozen=True):
    """Means over the rows. Those of tokens are over the answers' tokens (or the texts', the first token excluded)."""

    rows: int
    tokens: int
    loss: float
    token_accuracy: float
    """Share of tokens that the model finds the most likely."""
    match: float | None
    """Share of greedy answers that match; None: the rows are texts."""


def evaluate(
    adapter: Annotated[str, typer.Argument(help="NAME or NAME@VERSION")],
    data: Annotated[
        Path, typer.Argument(help="JSONL file of text, prompt/completion or chat rows", exists=True, dir_okay=False)
    ],
    regex: Annotated[
        str | None, typer.Option(help="compare what this finds in the texts (its first group, if any)")
    ] = None,
    json_field: Annotated[str | None, typer.Option(help="compare this field of JSON texts; a.b is nested")] = None,
    max_tokens: Annotated[int, typer.Option(help="most tokens of a generated answer", min=1)] = 256,
    base: Annotated[bool, typer.Option(help="measure the base, too")] = True,
    as_json: common.AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Measure an adapter on the rows of a file: loss and accuracy of the expected answers' tokens, and how many greedy
    answers match, exactly or by --regex or --json-field. The base is measured beside it.
    """
    matches = matcher(regex, json_field)
    questions = [question(row) for row in parse_jsonl(data)]
    if not questions:
        raise EmptyCorpus("expected at least one row")
    client = AsyncClient(url, api_key=key or None, retry=common.retry.get())
    models: list[str | None] = [adapter, *([None] if base else [])]
    scores = asyncio.run(_scores(client, models, questions, matches, max_tokens))
    named = dict(zip([adapter, "base"], scores, strict=False))
    if as_json:
        print(msgspec.json.encode(named).decode())
    else:
        Console().print(_table(named))


def question(row: Row) -> Question:
    """Return what a row asks. A chat asks for its last message. Raises `MalformedRow`."""
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
        case PreferenceRow():
            raise MalformedRow("expected rows of texts, prompts and completions, or chats, got a pair", line=row.line)


def matcher(regex: str | None, field: str | None) -> Match:
    """Return how texts are compared. Raises `InvalidRequest`."""
    if regex is not None and field is not None:
        raise InvalidRequest("expected --regex or --json-field, got both")
    try:
        parts = partial(_found, re.compile(regex)) if regex is not None else partial(_field, field) if field else None
    except re.error as error:
        raise InvalidRequest(f"--regex: expected a regular expression, got {regex!r}: {error}") from error
    if parts is None:
        return lambda got, expected: got.strip() == expected.strip()
    return lambda got, expected: (value := parts(expected)) is not None and parts(got) == value


def _found(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return None if found is None else found[min(1, pattern.groups)]


def _field(path: str, text: str) -> object:
    """Return a field of a JSON text; None: it has none."""
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


async def _scores(
    client: AsyncClient, models: Iterable[str | None], questions: list[Question], matches: Match, max_tokens: int
) -> list[Score]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(asked: Question, model: str | None) -> _Row:
        async with places:
            return await _row(client, asked, model, matches, max_tokens)

    async with client:
        return [_mean(await asyncio.gather(*(one(asked, model) for asked in questions))) for model in models]


@dataclass(frozen=True)
class _Row:
    loss: float
    """Sum over the tokens."""
    right: int
    tokens: int
    match: bool | None


async def _row(client: AsyncClient, asked: Question, model: str | None, matches: Match, max_tokens: int) -> _Row:
    prompt: str | list[int] = asked.source.get("prompt", "")
    first, match = 1, None
    if asked.answer is not None:
        given = await client.generate(
            **asked.source, adapter=model, max_tokens=max_tokens, temperature=0.0, return_prompt_ids=True
        )
        answer = await client.generate(
            asked.answer,
            adapter=model,
            max_tokens=0,
            prompt_logprobs=0,
            return_prompt_ids=True,
            add_special_tokens=False,
        )
        before = given.prompt_token_ids or []
        prompt, first = [*before, *(answer.prompt_token_ids or [])], len(before)
        match = matches(given.choices[0].text, asked.answer)
    scored = await client.generate(prompt, adapter=model, max_tokens=0, prompt_logprobs=1)
    tokens = [token for token in (scored.prompt_logprobs or [])[first:] if token.logprob is not None]
    right = sum(token.top[0].token_id == token.token_id for token in tokens)
    return _Row(-sum(token.logprob or 0.0 for token in tokens), right, len(tokens), match)


def _mean(rows: list[_Row]) -> Score:
    tokens, matched = sum(row.tokens for row in rows), [row.match for row in rows if row.match is not None]
    return Score(
        rows=len(rows),
        tokens=tokens,
        loss=sum(row.loss for row in rows) / max(tokens, 1),
        token_accuracy=sum(row.right for row in rows) / max(tokens, 1),
        match=sum(matched) / len(matched) if matched else None,
    )


def _table(scores: dict[str, Score]) -> Table:
    table = Table()
    for name in ("model", "rows", "tokens", "loss", "perplexity", "token accuracy", "match"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, score in scores.items():
        match = "" if score.match is None else f"{score.match:.1%}"
        means = (f"{score.loss:.4f}", f"{math.exp(min(score.loss, 700)):.3f}", f"{score.token_accuracy:.1%}", match)
        table.add_row(name, str(score.rows), str(score.tokens), *means)
    return table
