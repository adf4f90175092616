"""Runs batches: each line is an ordinary request of the class batch, answered when the others leave room."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from coserve.api.http.parsing import decode_last
from coserve.api.openai.batches.schemas import Answered, BatchAnswer, BatchLine, BatchResult
from coserve.api.openai.batches.store import ERRORS, OUTPUT, BatchProblem, BatchRecord, BatchStatus, BatchStore
from coserve.api.openai.errors import openai_error
from coserve.core import errors
from coserve.core.access.principal import Principal, Scope, act_as
from coserve.core.cancellation import cancel_all, task_group, uncancelled, uncancelled_thread
from coserve.state.durable import read_errors, write_errors
from coserve.state.files import FileStore
from coserve.state.item_log import ItemLog

log = logging.getLogger(__name__)

IN_FLIGHT = 64
"""Most requests of a batch at a time."""
RETRY = 1.0
"""Seconds before a retry: of a request that found no engine or a full queue, and of a write that the disk refused."""
MAX_REQUESTS = 50_000
"""Requests of a batch, as at OpenAI."""
MAX_LINE = 8 << 20
"""Most bytes of a request: `IN_FLIGHT` of them are in memory."""
MAX_PROBLEMS = 100
BATCH_FILES = "batch_output"
"""Purpose of the files that batches write."""
Answer = Callable[[bytes], Awaitable[bytes]]
"""Answers the JSON body of a request with JSON. Raises `CoserveError`."""


class _Line(NamedTuple):
    start: int
    length: int
    custom_id: str


class _Found(NamedTuple):
    name: str
    """`OUTPUT` or `ERRORS`."""
    result: BatchResult


class BatchRunner:
    """The batches of a daemon. `answers`: by endpoint; `admit`: counts a request of a project, or raises
    `QuotaExceeded`."""

    def __init__(
        self, store: BatchStore, files: FileStore, answers: Mapping[str, Answer], admit: Callable[[str], None]
    ) -> None:
        self.store, self._files, self._answers, self._admit = store, files, answers, admit
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._saving = asyncio.Lock()

    async def open(self) -> None:
        """Read all batches, and go on with those that have not ended. Raises `StorageError`."""
        await asyncio.to_thread(self.store.load)
        for record in self.store.all():
            if not record.ended:
                self._start(record)

    async def close(self) -> None:
        """Stop. Unanswered requests are answered after the next start."""
        await cancel_all(self._tasks.values())

    async def create(self, record: BatchRecord) -> None:
        """Store a batch and start it. Raises `NotFound` without its file, `InvalidRequest` if the file has another
        purpose, `StorageError`."""
        content = self._files.content(record.input_file_id, "batch", field="input_file_id")
        await uncancelled(asyncio.create_task(self._create(record, content)))  # a stored batch runs

    async def _create(self, record: BatchRecord, content: Path) -> None:
        await asyncio.to_thread(self.store.add, record, content)
        self._start(record)

    async def cancel(self, id: str) -> BatchRecord:
        """Cancel a batch: its requests in flight end, answers that it has are kept. Raises `NotFound`,
        `InvalidRequest` for one that has ended."""
        return await uncancelled(asyncio.create_task(self._cancel(id)))

    async def _cancel(self, id: str) -> BatchRecord:
        record = self.store.get(id)
        if record.ended:
            raise errors.InvalidRequest(f"expected a batch that runs, got one that is {record.status}", field="id")
        task = self._tasks.get(id)
        if record.status == "finalizing" and task is not None:  # its files are being made, at once
            await asyncio.wait({task})
        elif record.status != "cancelling":
            await self._set(id, status="cancelling", cancelling_at=time.time())
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
            if id not in self._tasks and not self.store.get(id).ended:  # another cancellation may have come between
                self._start(self.store.get(id))
        return self.store.get(id)

    def _start(self, record: BatchRecord) -> None:
        task = self._tasks[record.id] = asyncio.create_task(self._run(record.id))
        task.add_done_callback(lambda ended: self._tasks.pop(record.id) if self._tasks[record.id] is ended else None)

    async def _run(self, id: str) -> None:
        """Run a batch to its end for its project, also if it was begun before. A disk that refuses is tried again."""
        act_as(Principal(self.store.get(id).project, frozenset({Scope.GENERATE})))
        step = partial(self._advance, id)
        while not self.store.get(id).ended:
            try:
                await step()
            except errors.StorageError as error:
                log.warning("batch %s waits: %s", id, error.message)
                await asyncio.sleep(RETRY)
            except Exception:  # our own fault in one batch: it alone fails
                log.exception("batch %s ended by an internal error", id)
                problem = BatchProblem(errors.InternalError.code, "internal error; the daemon's log has it")
                step = partial(self._end, id, "failed", [problem])

    async def _advance(self, id: str) -> None:
        record = self.store.get(id)
        done = {name: await asyncio.to_thread(self._results(id, name).read) for name in (OUTPUT, ERRORS)}
        await self._set(id, completed=len(done[OUTPUT]), failed=len(done[ERRORS]))
        if record.status in ("validating", "in_progress"):
            lines, problems = await asyncio.to_thread(self._read, record)
            if problems:
                await self._end(id, "failed", problems)
                return
            began = record.in_progress_at or time.time()
            await self._set(id, status="in_progress", total=len(lines), in_progress_at=began)
            known = {each.custom_id for each in chain(*done.values())}
            await self._answer_all(record, [line for line in lines if line.custom_id not in known])
            await self._set(id, status="finalizing", finalizing_at=time.time())
        await self._end(id, "cancelled" if record.status == "cancelling" else "completed")

    async def _end(self, id: str, status: BatchStatus, problems: Sequence[BatchProblem] = ()) -> None:
        """End a batch; the results that it has become files."""
        kept = {"output_file_id": OUTPUT, "error_file_id": ERRORS}
        found = {field: await uncancelled_thread(self._keep, id, name) for field, name in kept.items()}
        await self._set(id, status=status, ended_at=time.time(), problems=list(problems), **found)

    def _results(self, id: str, name: str) -> ItemLog[Answered]:
        return ItemLog(self.store.results(id, name), Answered)

    async def _set(self, id: str, **changes: object) -> None:
        """Change a record, unless the batch has ended."""
        async with self._saving:
            before = self.store.get(id)
            record = msgspec.structs.replace(before, **changes)
            if record != before and not before.ended:
                await uncancelled_thread(self.store.save, record)

    def _read(self, record: BatchRecord) -> tuple[list[_Line], list[BatchProblem]]:
        """Return the positions of the file's requests, and the problems of the file."""
        lines, problems, seen, start = list[_Line](), list[BatchProblem](), set[str](), 0

        def wrong(code: str, message: str, number: int | None = None) -> None:
            if len(problems) < MAX_PROBLEMS:
                problems.append(BatchProblem(code, message, line=number))

        try:
            with read_errors(), self.store.input(record.id).open("rb") as file:
                if file.peek(len(BOM_UTF8)).startswith(BOM_UTF8):
                    start = len(file.read(len(BOM_UTF8)))
                for number, raw in enumerate(file, 1):
                    if len(raw) > MAX_LINE:
                        wrong("line_too_long", f"expected at most {MAX_LINE} bytes, got {len(raw)}", number)
                    elif raw.strip():
                        try:
                            line = decode_last(raw, BatchLine)
                        except errors.CoserveError as error:
                            wrong("invalid_json_line", str(error)[:500], number)
                        else:
                            if line.url != record.endpoint:
                                wrong("mismatched_endpoint", f"expected {record.endpoint}, got {line.url}", number)
                            if line.custom_id in seen:
                                wrong("duplicate_custom_id", f"{line.custom_id!r} is there twice", number)
                            seen.add(line.custom_id)
                            lines.append(_Line(start, len(raw), line.custom_id))
                    start += len(raw)
        except FileNotFoundError:
            wrong("file_not_found", f"there is no file {record.input_file_id}")
            return [], problems
        if not lines and not problems:
            wrong("empty_file", "expected at least one request")
        if len(lines) > MAX_REQUESTS:
            wrong("too_many_requests", f"expected at most {MAX_REQUESTS} requests, got {len(lines)}")
        return lines, problems

    async def _answer_all(self, record: BatchRecord, lines: list[_Line]) -> None:
        """Answer the requests, and write the results as they come, those that wait for the disk together."""
        waiting, found, quota, writing = iter(lines), list[_Found](), asyncio.Lock(), asyncio.Lock()

        async def work() -> None:
            for line in waiting:
                async with quota:
                    await self._admitted(record.project)
                found.append(await self._answer(record, line))
                async with writing:
                    await self._write(record.id, found)

        async with task_group() as workers:
            for _ in range(min(IN_FLIGHT, len(lines))):
                workers.create_task(work())

    async def _admitted(self, project: str) -> None:
        """Wait until the project's quota has room for a request, and count it."""
        while True:
            try:
                self._admit(project)
                return
            except errors.QuotaExceeded as error:
                await asyncio.sleep(error.retry_after or RETRY)

    async def _write(self, id: str, found: list[_Found]) -> None:
        """Write results, and remove them from the list."""
        results, found[:] = [*found], []
        for name in (OUTPUT, ERRORS):
            if lines := [each.result for each in results if each.name == name]:
                await uncancelled_thread(self._results(id, name).append, *lines)
                self.store.count(id, **{"completed" if name == OUTPUT else "failed": len(lines)})

    async def _answer(self, record: BatchRecord, line: _Line) -> _Found:
        raw = await asyncio.to_thread(_read_at, self.store.input(record.id), line.start, line.length)
        body = bytes(msgspec.json.decode(raw, type=BatchLine).body)
        while True:
            try:
                name, status, answer = OUTPUT, 200, await self._answers[record.endpoint](body)
                break
            except (errors.EngineUnavailable, errors.QueueFull, errors.Overloaded):
                await asyncio.sleep(RETRY)
            except errors.CoserveError as error:
                name, status, answer = ERRORS, error.status, msgspec.json.encode(openai_error(error))
                break
        id = secrets.token_hex(12)
        result = BatchResult(line.custom_id, f"batch_req_{id}", BatchAnswer(status, f"req_{id}", msgspec.Raw(answer)))
        return _Found(name, result)

    def _keep(self, id: str, name: str) -> str | None:
        """Make a file of the results; return its id, None without results. Raises `StorageError`."""
        path = self.store.results(id, name)
        if not path.exists():
            return None
        staged = path.with_suffix(".staged")
        with write_errors():  # a link: should the daemon die before the record is written, the results are still there
            staged.unlink(missing_ok=True)
            os.link(path, staged)
        return self._files.add(staged, f"{id}_{name}", BATCH_FILES).id


def _read_at(path: Path, start: int, length: int) -> bytes:
    with read_errors(), path.open("rb") as file:
        file.seek(start)
        return file.read(length)
