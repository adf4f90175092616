"""What is asked of each arm of the documents' benchmarks, and how answers count."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

from benchmarks.documents.facts import KINDS, LETTERS, Document, Question
from benchmarks.serving.http_daemon import serving
from coserve.client import AsyncClient

ANSWER_TOKENS = 64
"""Two sentences about two facts."""
BOOTSTRAPS = 10_000
LIKELIEST = "likeliest"
"""Kind of a row of choices by the letter of the greatest log-probability."""


@dataclass(frozen=True)
class Row:
    """How an arm answered a document's questions of one kind."""

    seed: int
    document: str
    arm: str
    kind: str
    right: int
    asked: int
    prompt_tokens: float
    """Mean of the prompts."""


class Answered(NamedTuple):
    """Whether an answer is right, the tokens of its prompt, and how many of them the prefix cache had."""

    right: bool
    tokens: int
    cached: int
    likeliest: bool
    """Of a choice: whether the likeliest letter is right."""


def daemon(options: Sequence[str], folder: Path) -> contextlib.AbstractContextManager[str]:
    """Run a daemon on this data folder; yields its URL."""
    return serving(["--port", "0", "--data-dir", str(folder), *options], folder / "daemon.log")


def right(question: Question, text: str) -> bool:
    """Whether an answer has the expected values, or for an unanswerable question none of the document's; for a
    choice, whether it begins with its letter, which is not the article "A"."""
    if question.kind == "choice":
        return re.match(rf"\W*{question.answers[0]}\b(?! (?!is\b)[a-z])", text) is not None
    found: list[bool] = [answer.lower() in text.lower() for answer in question.answers]
    return not any(found) if question.kind == "unanswerable" else all(found)


def in_prompt(question: str, context: str | None) -> str:
    """Return what is asked: the document stands in the prompt as it does in the generator's."""
    if context is None:
        return question
    return f"Read this text:\n\n{context}\n\nQuestion: {question}\nAnswer in one short sentence."


class Arms:
    """Asks one document's questions of a daemon, and keeps the rows."""

    def __init__(self, client: AsyncClient, seed: int, document: Document, rows: list[Row]) -> None:
        self._client, self._seed, self._document, self._rows = client, seed, document, rows

    async def ask(self, arm: str, adapter: str | None = None, context: str | None = None) -> None:
        answers = await self.answers(adapter, context)
        for kind in KINDS:
            own = [found for found, q in zip(answers, self._document.questions, strict=True) if q.kind == kind]
            if own:
                count, size = sum(each.right for each in own), fmean(each.tokens for each in own)
                self._rows.append(Row(self._seed, self._document.name, arm, kind, count, len(own), size))
            if own and kind == "choice":
                count = sum(each.likeliest for each in own)
                self._rows.append(Row(self._seed, self._document.name, arm, LIKELIEST, count, len(own), size))

    async def answers(self, adapter: str | None, context: str | None) -> list[Answered]:
        """How each question is answered."""

        async def one(question: Question) -> Answered:
            asked = [{"role": "user", "content": in_prompt(question.text, context)}]
            answer = await self._client.generate(
                messages=asked, adapter=adapter, temperature=0.0, max_tokens=ANSWER_TOKENS, slo_class="batch"
            )
            likeliest = False
            if question.kind == "choice":
                letter = await self._client.generate(
                    messages=asked,
                    adapter=adapter,
                    temperature=0.0,
                    max_tokens=1,
                    slo_class="batch",
                    structured_outputs={"choice": list(LETTERS)},
                )
                likeliest = letter.choices[0].text == question.answers[0]
            cached = answer.usage.prompt_tokens_details.cached_tokens
            return Answered(right(question, answer.choices[0].text), answer.usage.prompt_tokens, cached, likeliest)

        return list(await asyncio.gather(*(one(question) for question in self._document.questions)))


def recovered(rows: Sequence[Row], arm: str) -> tuple[float, tuple[float, float]] | None:
    """The share of the context's gain that an arm has, and its 95% interval by a bootstrap over documents; None if the
    context gains nothing, or nothing was asked of the arm."""
    each = _paired(rows, ("template", "choice"), (arm, "floor", "context"))

    def share(chosen: Sequence[tuple[float, ...]]) -> float | None:
        own, floor, context = (sum(column) for column in zip(*chosen, strict=True))
        return (own - floor) / (context - floor) if context > floor else None

    return _bootstrapped(each, share)


def gained(rows: Sequence[Row], arm: str, other: str, kind: str) -> tuple[float, tuple[float, float]] | None:
    """By how much more of a kind's questions an arm answers right than another one, of the documents that both were
    asked about, and its 95% interval by a bootstrap over documents; None: there are none."""
    each = _paired(rows, (kind,), (arm, other))
    return _bootstrapped(each, lambda chosen: fmean(own - rival for own, rival in chosen))


def choices(rows: Sequence[Row], arm: str) -> tuple[float, str, dict[str, object]]:
    """Return an arm's share of right choices by the likeliest letter, its unit, and what else is told: the share by the
    letter that was generated, and both beside the base without and with the document."""
    asked = [row for row in rows if row.arm == arm]
    own = shares(asked)[arm]
    about: dict[str, object] = {"generated": own["choice"], "documents": len({row.document for row in asked})}
    for other in ("floor", "context"):
        for name, kind in (("likeliest", LIKELIEST), ("generated", "choice")):
            found = None if arm == other else gained(rows, arm, other, kind)
            if found is not None:
                about[f"{name}_over_{other}"] = {"gained": round(found[0], 4), "bootstrap_95": found[1]}
    return own[LIKELIEST], "fraction", about


def _paired(rows: Sequence[Row], kinds: Sequence[str], arms: Sequence[str]) -> list[tuple[float, ...]]:
    """Each document's shares of right answers by these arms, of the documents that all of them were asked about."""
    by_document = defaultdict[str, dict[str, float]](dict)
    for row in rows:
        if row.kind in kinds:
            by_document[row.document][row.arm] = row.right / row.asked
    return [tuple(own[arm] for arm in arms) for own in by_document.values() if own.keys() >= set(arms)]


def _bootstrapped(
    each: Sequence[tuple[float, ...]], statistic: Callable[[Sequence[tuple[float, ...]]], float | None]
) -> tuple[float, tuple[float, float]] | None:
    """The statistic of all documents, and its 95% interval; None if it has no value."""
    value, rng = statistic(each) if each else None, Random(0)
    if value is None:
        return None
    drawn = (statistic(rng.choices(each, k=len(each))) for _ in range(BOOTSTRAPS))
    ordered = sorted(found for found in drawn if found is not None)
    low, high = (ordered[int(at * (len(ordered) - 1))] for at in (0.025, 0.975))
    return value, (round(low, 4), round(high, 4))


def shares(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Shares of right answers by arm and kind."""
    counts = defaultdict[tuple[str, str], list[int]](lambda: [0, 0])
    for row in rows:
        counts[row.arm, row.kind][0] += row.right
        counts[row.arm, row.kind][1] += row.asked
    found = defaultdict[str, dict[str, float]](dict)
    for (arm, kind), (ok, asked) in counts.items():
        found[arm][kind] = round(ok / asked, 3)
    return dict(found)
