"""Sends the registry's records of jobs to trackers in the background: no job and no request waits for a tracker. Small
files have the last event of each job that was sent, so that a restarted daemon continues there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from coserve.api.tracking.points import end_of, points_of, run_of, texts_of
from coserve.api.tracking.task import close_all, track
from coserve.core.errors import CoserveError, InvalidRequest, JobNotFound, TrackingFailed
from coserve.core.names import is_name
from coserve.core.schemas.jobs import JobEvent
from coserve.core.validation import decode_json
from coserve.data.offload.pool import HelperPool
from coserve.state.registry.records import JobRecord
from coserve.state.registry.registry import Registry
from coserve.state.retries import Backoff
from coserve.state.thread import RegistryThread

log = logging.getLogger(__name__)

PAUSE = 1.0
"""Seconds between two rounds: steps that end within them are sent together."""
BACKOFF = Backoff(first=2.0, longest=60.0)
CLOSING = 10.0
"""Seconds that a tracker may still take when the daemon stops."""


class Cursor(msgspec.Struct, frozen=True):
    """Numbers of the last event and of the last optimizer step that were sent to the tracker."""

    seq: int = 0
    step: int = 0


class Cursors:
    """Cursor files of one tracker: one for each job whose end was not sent to it.

    Files are replaced but not synced: after a power cut, steps may be sent again; the sink stores them once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def jobs(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.json") if is_name(path.stem))

    def read(self, job: str) -> Cursor:
        """Return the job's cursor; it is created if the job has none."""
        try:
            return decode_json(self._path(job).read_bytes(), Cursor)
        except FileNotFoundError:
            self.write(job, cursor := Cursor())
            return cursor
        except msgspec.DecodeError as error:
            log.warning("%s cannot be read, the job's steps are sent again from its first: %s", self._path(job), error)
            return Cursor()

    def write(self, job: str, cursor: Cursor) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        new = self._path(job).with_suffix(".new")
        new.write_bytes(msgspec.json.encode(cursor))
        new.replace(self._path(job))

    def remove(self, job: str) -> None:
        self._path(job).unlink(missing_ok=True)

    def _path(self, job: str) -> Path:
        return self._folder / f"{job}.json"


class TrackerFeed:
    """Feeds one tracker, in its own helper process. The registry is the source: a tracker that was unavailable is sent
    the rest later, and each step once."""

    def __init__(
        self,
        tracker: str,
        folder: Path,
        registry: RegistryThread,
        helpers: HelperPool,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        closing: float = CLOSING,
    ) -> None:
        """`folder`: for the tracker's files. `sleep` takes seconds. `closing`: see `CLOSING`."""
        self._tracker, self._folder, self._registry, self._helpers = tracker, folder, registry, helpers
        self._cursors = Cursors(folder / "cursors")
        self._sleep, self._closing = sleep, closing
        self._changed = asyncio.Event()
        self._jobs: set[str] = set()
        """Jobs with new records."""
        self._trouble: str | None = None
        self._sent: dict[str, Cursor] = {}
        """Cursors of the jobs that this process has sent; the files may be older."""
        self._running: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[bool] | None = None
        """The round in progress. It is not cancelled with `_running`, because that would kill the process and its open
        runs."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Why the tracker is behind; for /health."""
        return () if self._trouble is None else (f"tracker {self._tracker}: {self._trouble}; it is tried again",)

    def open(self) -> None:
        """Begin, with the jobs that are unfinished or whose end was not sent to the tracker."""
        self._running = asyncio.create_task(self._run())

    def notify(self, job: str) -> None:
        """Note that a change of the job was committed."""
        self._jobs.add(job)
        self._changed.set()

    async def close(self) -> None:
        """Send the tracker the rest, as far as it accepts it at once, and close its runs."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(TimeoutError, CoserveError):
                async with asyncio.timeout(self._closing):
                    if self._telling is not None:
                        await self._telling
                        if self._trouble is None:
                            await self._round()
                        await self._helpers.run(close_all)
        await self._helpers.close()

    async def _run(self) -> None:
        delays = BACKOFF.delays()
        while (unfinished := await self._unfinished()) is None:
            await self._sleep(next(delays))
        self._jobs |= unfinished
        while True:
            if not self._jobs:
                await self._changed.wait()
            self._changed.clear()
            self._telling = asyncio.create_task(self._round())
            done = await asyncio.shield(self._telling)
            if done:
                delays = BACKOFF.delays()
            await self._sleep(PAUSE if done else next(delays))

    async def _unfinished(self) -> set[str] | None:
        """Return the unfinished jobs; None: they cannot be read now."""
        try:
            with _file_errors():
                known = await asyncio.to_thread(self._cursors.jobs)
            records = await self._registry(lambda registry: registry.unfinished())
        except CoserveError as error:
            self._report(error.message)
            return None
        return {*known, *(record.spec.id for record in records)}

    async def _round(self) -> bool:
        """Send each job's new records. Returns False if that failed for some job."""
        jobs, self._jobs = self._jobs, set()
        problem = None
        for job in sorted(jobs):
            try:
                await self._send(job)
            except JobNotFound:
                self._sent.pop(job, None)
                with contextlib.suppress(OSError):  # the next start tries again
                    await asyncio.to_thread(self._cursors.remove, job)
            except CoserveError as error:
                self._jobs.add(job)
                silent = isinstance(error, InvalidRequest)
                problem = f"no answer in {self._helpers.silence:.0f} s" if silent else error.message
            except Exception:  # our own fault in one job: the others are still tracked
                log.exception("tracker %s: job %s is not tracked", self._tracker, job)
        self._report(problem)
        return problem is None

    def _report(self, problem: str | None) -> None:
        if problem is not None and self._trouble is None:
            log.warning("tracker %s: %s; trying again", self._tracker, problem)
        if problem is None and self._trouble is not None:
            log.info("tracker %s works again", self._tracker)
        self._trouble = problem

    async def _send(self, job: str) -> None:
        if job not in self._sent:
            with _file_errors():
                self._sent[job] = await asyncio.to_thread(self._cursors.read, job)
        while True:
            cursor = self._sent[job]
            record, events = await self._registry(_reader(job, cursor.seq))
            if not events:
                return
            points, texts, ended = points_of(events, cursor.step), texts_of(events), end_of(events)
            if points or texts or ended is not None:
                told = self._tracker, str(self._folder), run_of(record), cursor.step, points, texts, ended
                await self._helpers.run(track, *told)
            self._sent[job] = Cursor(events[-1].seq, points[-1].step if points else cursor.step)
            with _file_errors():
                if ended is not None:
                    await asyncio.to_thread(self._cursors.remove, job)
                    del self._sent[job]
                    return
                await asyncio.to_thread(self._cursors.write, job, self._sent[job])


@contextlib.contextmanager
def _file_errors() -> Iterator[None]:
    """Raise errors of the cursor files as `TrackingFailed`."""
    try:
        yield
    except OSError as error:
        raise TrackingFailed(f"its folder cannot be used: {error.strerror}") from error


def _reader(job: str, after: int) -> Callable[[Registry], tuple[JobRecord, list[JobEvent]]]:
    return lambda registry: (registry.job(job), registry.events(job, after=after))
