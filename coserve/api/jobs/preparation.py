"""Tokenises a corpus file in helper processes, piece by piece.

The result is as from one process: pieces are joined in their order, and the first error in the file's order is raised.
Corpora alternate in the pool's queue, so a small one waits for a few pieces of a large one, not for all of it.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

import msgspec

from coserve.api.jobs.sources import validation_errors
from coserve.core.cancellation import cancel_all, uncancelled_thread
from coserve.core.errors import CorpusError, EmptyCorpus
from coserve.core.schemas.jobs import Job, Preparing, SubmissionEvent
from coserve.data.corpus.columns import Columns
from coserve.data.corpus.limits import LIMITS, CorpusLimits
from coserve.data.corpus.staging import (
    CorpusPart,
    StagedCorpus,
    join_parts,
    split_into_pieces,
    tokenize_piece,
)
from coserve.data.corpus.tokenize import NO_ROWS, Tokenization
from coserve.data.evaluation import Question, read_questions
from coserve.data.offload.pool import HelperPool

T = TypeVar("T")
Show = Callable[[Preparing], None]
"""Callback whenever more of a corpus is tokenised."""
Report = Callable[[int, float], None]
"""Callback with the number of tokenised rows, and the fraction of the corpus that they are."""


class CorpusPreparation:
    """Tokenises corpora with a pool of helpers. `folder`: for unfinished corpora. `workers`: processes of the pool; a
    corpus has at most `workers + 1` pieces queued or running. `room` returns the most bytes of rows that a gzip file of
    the running request may hold."""

    def __init__(
        self,
        helpers: HelperPool,
        folder: Path,
        workers: int,
        room: Callable[[], Awaitable[int]],
        limits: CorpusLimits = LIMITS,
    ) -> None:
        self._helpers, self._folder, self._window, self._limits = helpers, folder, workers + 1, limits
        self._room = room

    async def tokenize(
        self,
        source: Path,
        options: Tokenization,
        report: Report = lambda *_: None,
        columns: Columns | None = None,
        validation: Path | None = None,
    ) -> StagedCorpus:
        """Tokenise `source`, followed by the rows of `validation`; unused columns are added to `columns`. Raises
        `CorpusError` subclasses, with the line in its file, `InvalidRequest`, `HelperLost`, `StorageError`. On an error
        or cancellation, no file stays on the disk."""
        columns = Columns() if columns is None else columns
        folder = self._folder / f"corpus-{secrets.token_hex(8)}"  # partial files have a unique name
        try:
            parts, held = await self._parts(source, options, columns, folder, report), list[CorpusPart]()
            if validation is not None:
                with validation_errors():
                    held = await self._parts(validation, options, columns, folder / "held", lambda *_: None)
            staged = await self._helpers.run(join_parts, [*parts, *held], str(folder / "corpus"))
        except BaseException:
            await uncancelled_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        return msgspec.structs.replace(staged, validation_rows=sum(part.rows for part in held))

    async def questions(self, source: Path, columns: Columns, most: int) -> list[Question]:
        """Return what the first `most` rows of a file or folder ask. Raises as `tokenize`, and `MalformedRow`."""
        copy = self._folder / f"rows-{secrets.token_hex(8)}"
        try:
            room = await self._room()
            return await self._helpers.run(read_questions, str(source), str(copy), columns.names, most, room)
        finally:
            await uncancelled_thread(copy.unlink, missing_ok=True)

    async def _parts(
        self, source: Path, options: Tokenization, columns: Columns, folder: Path, report: Report
    ) -> list[CorpusPart]:
        room = await self._room()
        split = await self._helpers.run(split_into_pieces, str(source), str(folder / "rows"), columns.names, room)
        columns.add_unused(split.unused)
        pieces = split.pieces
        calls = (
            self._helpers.run(tokenize_piece, each, str(folder / f"part-{i}"), options, columns.names)
            for i, each in enumerate(pieces)
        )
        parts: list[CorpusPart] = []
        lines = rows = 0
        async with aclosing(_in_order(calls, self._window)) as results:
            try:
                async for part in results:
                    lines += part.lines
                    rows += part.rows
                    parts.append(part)
                    columns.add_unused(part.unused)
                    report(rows, len(parts) / len(pieces))
                    if lines > self._limits.rows:
                        break
            except CorpusError as error:
                raise error.moved(lines) from error
        self._limits.check_line(min(lines, self._limits.rows + 1))
        if rows == 0:
            raise EmptyCorpus(NO_ROWS)
        return parts


async def submission_events(
    submit: Callable[[Show], Coroutine[None, None, Job]], heartbeat: float
) -> AsyncGenerator[SubmissionEvent | None, None]:
    """Yield the progress that `submit` shows (only the latest), then its job; None after every `heartbeat` seconds
    without news. Raises what `submit` raises. Closing the generator cancels `submit`."""
    latest: list[Preparing] = []
    news = asyncio.Event()

    def show(preparing: Preparing) -> None:
        latest[:] = [preparing]
        news.set()

    task = asyncio.create_task(submit(show))
    task.add_done_callback(lambda _: news.set())
    try:
        while not task.done():
            try:
                async with asyncio.timeout(heartbeat):
                    await news.wait()
            except TimeoutError:
                yield None
                continue
            news.clear()
            if not task.done():
                yield SubmissionEvent(preparing=latest[0])
        yield SubmissionEvent(job=await task)
    finally:
        await cancel_all([task])


async def _in_order(calls: Iterable[Coroutine[None, None, T]], window: int) -> AsyncGenerator[T, None]:
    """Yield the results of `calls` in their order; at most `window` of them run at the same time. Once this raises or
    is closed, none runs."""
    running: deque[asyncio.Task[T]] = deque()
    try:
        for call in calls:
            running.append(asyncio.create_task(call))
            if len(running) == window:
                yield await running[0]
                running.popleft()
        while running:
            yield await running[0]
            running.popleft()
    finally:
        await cancel_all(running)
