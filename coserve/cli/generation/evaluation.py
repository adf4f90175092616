"""The command `coserve eval`: measures an adapter on held-out rows, and compares it with the base."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coserve.cli import common
from coserve.cli.common import DEFAULT_URL, Key, Url
from coserve.cli.finetuning.settings import ColumnNames, column_names
from coserve.client import AsyncClient
from coserve.core.errors import EmptyCorpus
from coserve.core.schemas.jobs import EvalScore
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.conversion import json_lines
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.evaluation import Match, Question, RowScore, matcher, mean_score, question, row_score

AT_ONCE = 16
"""Rows in flight at a time."""


def evaluate(
    adapter: Annotated[str, typer.Argument(help="NAME or NAME@VERSION")],
    data: Annotated[
        Path,
        typer.Argument(
            help="file of text, prompt/completion or chat rows: JSON Lines, CSV, parquet or a JSON array",
            exists=True,
            dir_okay=False,
        ),
    ],
    columns: ColumnNames = None,
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
    answers match, exactly or by --regex or --json-field. The base is measured too, for comparison.
    """
    matches = matcher(regex, json_field)
    names = Columns(column_names(columns or []))
    with json_lines(data, names) as lines:
        questions = [question(row) for row in parse_jsonl(lines, columns=names)]
    if not questions:
        raise EmptyCorpus("expected at least one row")
    client = AsyncClient(url, api_key=key or None, retry=common.retry_policy())
    models: list[str | None] = [adapter, *([None] if base else [])]
    scores = asyncio.run(_scores(client, models, questions, matches, max_tokens))
    named = dict(zip([adapter, "base"], scores, strict=False))
    if as_json:
        common.print_json(named)
    else:
        Console().print(_table(named))


async def _scores(
    client: AsyncClient, models: Iterable[str | None], questions: list[Question], matches: Match, max_tokens: int
) -> list[EvalScore]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(asked: Question, model: str | None) -> RowScore:
        async with places:
            return await _row(client, asked, model, matches, max_tokens)

    async with client:
        return [mean_score(await asyncio.gather(*(one(asked, model) for asked in questions))) for model in models]


async def _row(client: AsyncClient, asked: Question, model: str | None, matches: Match, max_tokens: int) -> RowScore:
    prompt: str | list[int] = asked.source.get("prompt", "")
    first, match = 1, None
    if asked.answer is not None:
        given = await client.generate(
            **asked.source,
            adapter=model,
            max_tokens=max_tokens,
            temperature=0.0,
            repetition_penalty=1.0,  # a base may have one of its own
            return_prompt_ids=True,
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
    return row_score((scored.prompt_logprobs or [])[first:], match)


def _table(scores: dict[str, EvalScore]) -> Table:
    table = Table()
    for name in ("model", "rows", "tokens", "loss", "perplexity", "token accuracy", "match"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, score in scores.items():
        match = "" if score.match is None else f"{score.match:.1%}"
        means = (f"{score.loss:.4f}", f"{math.exp(min(score.loss, 700)):.3f}", f"{score.token_accuracy:.1%}", match)
        table.add_row(name, str(score.rows), str(score.tokens), *means)
    return table
