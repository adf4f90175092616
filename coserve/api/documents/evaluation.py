"""Evaluation of a document's adapter before it is published: the held-out questions with and without the document,
with and without the adapter."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from coserve.api.documents.asking import Asker
from coserve.core.cancellation import task_group
from coserve.core.errors import AdapterNotFound
from coserve.core.schemas.documents import AnswerScore, DocumentEvaluation
from coserve.core.types import AdapterRef, Wire
from coserve.data.documents.lessons import Lesson
from coserve.state.failpoints import failpoint
from coserve.state.item_log import ItemLog

STUDENT_T = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83)
"""Student's t of 95%, one-sided, by degrees of freedom from 1. Beyond them, 1.645 + 1.6 / degrees."""


class Scored(Wire, frozen=True):
    """An answer's negative log-likelihood (nats, summed over `tokens` tokens), and whether the greedy answer would be
    the same."""

    key: str
    nll: float
    tokens: int
    match: bool


Scores = list[Scored]


class Evaluation:
    """Evaluates one job. `folder`: the job's folder; scores already there are reused."""

    def __init__(self, folder: Path, asker: Asker, show: Callable[[int, int], Awaitable[None]]) -> None:
        """`show` gets how many items are done, and how many there are."""
        self._asker, self._show = asker, show
        self._log = ItemLog(folder / "scores.jsonl", Scored)

    async def run(
        self,
        lessons: Sequence[Lesson],
        reserved: Sequence[Lesson],
        snapshot: AdapterRef,
        step: int,
        find_other: Callable[[], Awaitable[str | None]],
        *,
        matches: bool,
    ) -> DocumentEvaluation:
        """Score the held-out `lessons` and the `reserved` general texts with the adapter `snapshot`, trained for `step`
        steps, and with another document's adapter, which `find_other` returns: once more if that one is deleted
        meanwhile. `matches`: whether the share of exact matches is reported."""
        other = await find_other()
        try:
            return await self._run(lessons, reserved, snapshot, step, other, matches=matches)
        except AdapterNotFound:
            if await find_other() == other:
                raise
            return await self.run(lessons, reserved, snapshot, step, find_other, matches=matches)

    async def _run(
        self,
        lessons: Sequence[Lesson],
        reserved: Sequence[Lesson],
        snapshot: AdapterRef,
        step: int,
        other: str | None,
        *,
        matches: bool,
    ) -> DocumentEvaluation:
        arms: dict[str, Callable[[Lesson], Coroutine[None, None, Scored]]] = {
            "floor": partial(self._score, "floor"),
            "in_context": partial(self._score, "in_context", in_context=True),
            "adapter": partial(self._score, f"step {step}", snapshot=snapshot),
        }
        if other is not None:
            arms["other"] = partial(self._score, other, adapter=other)
        self._found = {each.key: each for each in await asyncio.to_thread(self._log.read)}
        self._done, self._total = 0, len(arms) * len(lessons) + 2 * len(reserved)
        self._writing = asyncio.Lock()
        await self._show(0, self._total)
        async with task_group() as group:
            tasks = {arm: [group.create_task(score(lesson)) for lesson in lessons] for arm, score in arms.items()}
            kept = {arm: [group.create_task(arms[arm](text)) for text in reserved] for arm in ("floor", "adapter")}
        scores = {arm: [task.result() for task in own] for arm, own in tasks.items()}
        before, after = (_nll([task.result() for task in kept[arm]]) for arm in ("floor", "adapter"))
        rivals = [scores[arm] for arm in ("floor", "other") if arm in scores]
        floor, in_context, adapter = (_answers(scores[arm], matches) for arm in ("floor", "in_context", "adapter"))
        gain = floor.nll - in_context.nll
        return DocumentEvaluation(
            questions=len(lessons),
            floor=floor,
            in_context=in_context,
            adapter=adapter,
            other=_answers(scores["other"], matches) if other is not None else None,
            other_adapter=other,
            retention=after / before - 1 if before > 0 else 0.0,
            recovered=(floor.nll - adapter.nll) / gain if gain > 0 else None,
            learned=all(better(scores["adapter"], rival) for rival in rivals),
        )

    async def _score(
        self,
        arm: str,
        lesson: Lesson,
        *,
        in_context: bool = False,
        adapter: str | None = None,
        snapshot: AdapterRef | None = None,
    ) -> Scored:
        key = f"{arm}: {lesson.key}"
        if (made := self._found.get(key)) is None:
            prompt = lesson.context if in_context else lesson.prompt
            entries = await self._asker.score(prompt, lesson.answer, top=1, adapter=adapter, snapshot=snapshot)
            nll = -sum(0.0 if entry.logprob is None else entry.logprob for entry in entries)
            match = all(entry.top and entry.top[0].token_id == entry.token_id for entry in entries)
            failpoint("document.evaluation")
            made = Scored(key, nll, len(entries), match)
            async with self._writing:
                await asyncio.to_thread(self._log.append, made)
        self._done += 1
        if self._done % max(1, self._total // 4) == 0:
            await self._show(self._done, self._total)
        return made


def better(scores: Scores, rival: Scores) -> bool:
    """Return whether answers are more likely in `scores` than in `rival`, which has the same answers in the same order:
    the mean difference in nats per token is above 0 with 95% confidence (a t-test). One answer proves nothing."""
    gains = [(theirs.nll - own.nll) / own.tokens for own, theirs in zip(scores, rival, strict=True)]
    if (degrees := len(gains) - 1) < 1:
        return False
    factor = STUDENT_T[degrees - 1] if degrees <= len(STUDENT_T) else 1.645 + 1.6 / degrees
    return fmean(gains) > factor * stdev(gains) / math.sqrt(len(gains))


def _nll(scores: Scores) -> float:
    return sum(each.nll for each in scores) / max(1, sum(each.tokens for each in scores))


def _answers(scores: Scores, matches: bool) -> AnswerScore:
    match = fmean(each.match for each in scores) if matches and scores else None
    return AnswerScore(nll=_nll(scores), exact_match=match)
