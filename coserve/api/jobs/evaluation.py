"""Test rows of jobs: checked at submission, then answered by the trained adapter, and by the base, before the adapter
is published."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

import msgspec

from coserve.api.documents.asking import Asker
from coserve.api.generation.async_tokenizer import AsyncTokenizer
from coserve.api.generation.prompts import check_generate, encode_prompt
from coserve.api.jobs.recorder import JobRecorder
from coserve.api.node import Node
from coserve.core import errors
from coserve.core.cancellation import task_group
from coserve.core.link.jobs import JobNote, JobSnapshot
from coserve.core.schemas.generation import GenerateRequest
from coserve.core.schemas.jobs import MAX_EVAL_ROWS, EvalRequest, EvalResult, EvalScore
from coserve.core.types import AdapterRef, BaseSpec, Wire
from coserve.core.validation import check_one_given, decode_json
from coserve.data.corpus.rows import parse_rows
from coserve.data.evaluation import Match, Question, RowScore, matcher, mean_score, question, row_score
from coserve.state.durable import read_errors, write_file
from coserve.state.registry.records import JobRecord


class JobTest(Wire, frozen=True):
    """The test rows of a job, and how answers to them are compared."""

    settings: EvalRequest
    """The request without its rows."""
    questions: list[Question]

    def save(self, path: Path) -> None:
        """Write it; durable when this returns. Raises `StorageError`."""
        write_file(path, msgspec.json.encode(self), point="corpus")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote. Raises `CheckpointUnreadable`, `StorageError`."""
        try:
            with read_errors():
                return decode_json(path.read_bytes(), cls)
        except msgspec.DecodeError as error:
            raise errors.CheckpointUnreadable("they are damaged") from error


ReadFile = Callable[[str], Awaitable[list[Question]]]
"""Returns the questions of a file below the daemon's `data_root`."""


async def read_test(request: EvalRequest, base: BaseSpec, texts: AsyncTokenizer, read_file: ReadFile) -> JobTest:
    """Return the rows as questions. Raises `InvalidRequest`, `CorpusError` subclasses (with the row), `ForbiddenPath`,
    `HelperLost`, `StorageError`."""
    check_one_given({"data": request.data, "path": request.path}, field="test")
    try:
        matcher(request.regex, request.json_field)
    except errors.InvalidRequest as error:
        raise errors.InvalidRequest(error.message, field=f"test.{error.field}") from None
    try:
        if request.path is not None:
            questions = await read_file(str(request.path))
        else:
            questions = await asyncio.to_thread(lambda: [question(row) for row in parse_rows(request.data or [])])
    except errors.CorpusError as error:
        raise type(error)(f"test: {error.message}", field="test") from error
    except errors.RequestError as error:
        raise type(error)(error.message, field="test.path") from error
    if not 0 < len(questions) <= MAX_EVAL_ROWS:
        raise errors.InvalidRequest(f"expected 1 to {MAX_EVAL_ROWS} rows", field="test.path")
    settings = EvalRequest(
        regex=request.regex, json_field=request.json_field, max_tokens=min(request.max_tokens, base.context)
    )
    for number, asked in enumerate(questions, start=1):
        try:
            await _check(asked, settings, base, texts)
        except errors.RequestError as error:
            raise errors.InvalidRequest(f"row {number}: {error.message}", field="test") from error
    return JobTest(settings, questions)


async def _check(asked: Question, settings: EvalRequest, base: BaseSpec, texts: AsyncTokenizer) -> None:
    """Raise a `RequestError` for a row that is no valid request to the base, or does not fit into its context."""
    request = _ask(asked, settings)
    check_generate(request, base)
    length = len(await encode_prompt(request, base, texts))
    if asked.answer is not None:
        length += len(await encode_prompt(_answer(asked.answer), base, texts))
    if length > base.context:
        raise errors.InvalidRequest(f"expected at most the context's {base.context} tokens, got {length}")


def _ask(asked: Question, settings: EvalRequest) -> GenerateRequest:
    """Return the request for a greedy answer."""
    source = msgspec.convert(asked.source, GenerateRequest)
    return msgspec.structs.replace(source, max_tokens=settings.max_tokens, temperature=0.0, slo_class="batch")


def _answer(text: str) -> GenerateRequest:
    return GenerateRequest(prompt=text, add_special_tokens=False)


class JobEvaluation:
    """Measures the adapters of jobs that have test rows."""

    def __init__(self, node: Node, asker: Asker, recorder: JobRecorder) -> None:
        self._folder, self._asker, self._recorder = node.folder, asker, recorder

    async def evaluate(self, record: JobRecord, snapshot: JobSnapshot) -> bool:
        """Record the measures of a trained adapter, if its job has test rows. Returns False if the engine ends first.
        Rows that cannot be answered become a note."""
        id = record.spec.id
        path = self._folder.test(id)
        if record.test is not None or not await asyncio.to_thread(path.exists):
            return True
        try:
            test = await asyncio.to_thread(JobTest.load, path)
            message = f"testing: {len(test.questions)} rows"
            await self._recorder.change(id, lambda registry: registry.record_message(id, message))
            found = EvalResult(adapter=await self._score(test, snapshot.ref), base=await self._score(test, None))
        except errors.EngineUnavailable:
            return False
        except errors.CoserveError as error:
            self._recorder.deliver(JobNote(id=id, message=f"the test rows were not answered: {error}", kept=True))
            return True
        await self._recorder.retries.run(
            f"test of job {id}",
            lambda: self._recorder.change(id, lambda registry: registry.record(id, "test", summary(found), test=found)),
        )
        return True

    async def _score(self, test: JobTest, snapshot: AdapterRef | None) -> EvalScore:
        matches = matcher(test.settings.regex, test.settings.json_field)
        async with task_group() as group:
            work = [group.create_task(self._row(each, test.settings, snapshot, matches)) for each in test.questions]
        return mean_score([task.result() for task in work])

    async def _row(
        self, asked: Question, settings: EvalRequest, snapshot: AdapterRef | None, matches: Match
    ) -> RowScore:
        if asked.answer is None:
            tokens = await self._asker.prompt_ids(_ask(asked, settings))
            return row_score(await self._asker.score([], tokens, top=1, snapshot=snapshot), None)
        given = await self._asker.ask(_ask(asked, settings), snapshot)
        answer = await self._asker.prompt_ids(_answer(asked.answer))
        scored = await self._asker.score(given.prompt, answer, top=1, snapshot=snapshot)
        return row_score(scored, matches(given.text, asked.answer))


def summary(found: EvalResult) -> str:
    return f"test: {_measures(found.adapter)}; base: {_measures(found.base)}"


def _measures(score: EvalScore) -> str:
    match = "" if score.match is None else f", match {score.match:.1%}"
    return f"loss {score.loss:.4f}, token accuracy {score.token_accuracy:.1%}{match}"
