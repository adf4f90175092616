"""A whole warm-up: check what the cache folder holds, compile what is missing, keep the manifest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec

from coserve.warmup.lock import CacheLock
from coserve.warmup.manifest import (
    Manifest,
    clear_cache,
    is_intact,
    list_files,
    load_manifest,
    save_manifest,
    with_parts,
    without_files,
)
from coserve.warmup.messages import Progress, WarmUpTask
from coserve.warmup.parts import Part, PartSchedule
from coserve.warmup.watch import watch_renames
from coserve.warmup.worker_pool import REPORT_TIMEOUT, CacheFault, Worker, WorkerPool

log = logging.getLogger(__name__)

HELD = "another daemon compiles into the same cache folder; the rest is compiled when it has ended"


async def warm(
    task: WarmUpTask,
    parts: tuple[Part, ...],
    start_worker: Callable[[], Awaitable[Worker]],
    report: Callable[[Progress], None],
    *,
    report_timeout: float = REPORT_TIMEOUT,
) -> None:
    """Complete all `parts`. `report` is called after each change; the last progress has `ended`.

    The folder is cleared and everything compiled again if a file differs from the manifest, and once if a part fails
    without a known reason; parts that failed with a new cache, too, are tried again without that. While another warm-up
    holds the folder, the parts that it has checked or completed are reported; what is then still missing is compiled when
    it has ended. `report_timeout`: see `WorkerPool`.
    """
    with contextlib.closing(CacheLock(Path(task.folder))) as lock:
        if lock.acquire_now() or not await _found_meanwhile(task, parts, lock, report):
            await _compile_missing(task, parts, start_worker, report, lock.token, report_timeout)


async def _found_meanwhile(
    task: WarmUpTask, parts: tuple[Part, ...], lock: CacheLock, report: Callable[[Progress], None]
) -> bool:
    """Report the parts that another warm-up completes. True: all are; False: it has ended before, and this process has the lock."""
    folder = Path(task.folder)
    all_found = asyncio.Event()

    def look() -> None:
        manifest = load_manifest(folder, task.fields)
        if manifest.checked_by != lock.holder():  # the holder may find it damaged, and clear it
            manifest = Manifest(task.fields)
        schedule = _schedule(task, parts, manifest)
        if schedule.ended:
            all_found.set()
        else:
            report(_progress(schedule, waiting=True))

    with watch_renames(folder, look):
        look()
        ends = asyncio.create_task(all_found.wait()), asyncio.create_task(lock.acquire())
        try:
            if not all_found.is_set():
                log.info("warm-up: %s", HELD)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
    if all_found.is_set():
        report(_progress(PartSchedule(parts, [part.name for part in parts]), ended=True))
    return all_found.is_set()


async def _compile_missing(
    task: WarmUpTask,
    parts: tuple[Part, ...],
    start_worker: Callable[[], Awaitable[Worker]],
    report: Callable[[Progress], None],
    token: str,
    report_timeout: float,
) -> None:
    """`warm`, while this process holds the folder's lock, with this token."""
    folder = Path(task.folder)
    manifest = load_manifest(folder, task.fields)
    if not await asyncio.to_thread(is_intact, folder, manifest):
        log.warning("warm-up: the cache in %s is damaged; it is built again", folder)
        manifest = without_files(manifest)
    manifest = msgspec.structs.replace(manifest, checked_by=token)
    if manifest.parts:
        with contextlib.suppress(OSError):  # others wait longer
            save_manifest(folder, manifest)
    else:
        await asyncio.to_thread(clear_cache, folder)
    everything, known = frozenset(part.name for part in parts), frozenset(manifest.failed.get(task.shape, ()))
    for may_fail in (known, everything) if manifest.parts else (everything,):  # a cache built now is not suspected
        try:
            await _run_parts(
                task, _schedule(task, parts, manifest), manifest, start_worker, report, may_fail, report_timeout
            )
            return
        except CacheFault as fault:
            log.warning("warm-up: %s; the cache in %s is built again", fault, folder)
            await asyncio.to_thread(clear_cache, folder)
            manifest = without_files(manifest)


async def _run_parts(
    task: WarmUpTask,
    schedule: PartSchedule,
    manifest: Manifest,
    start_worker: Callable[[], Awaitable[Worker]],
    report: Callable[[Progress], None],
    may_fail: frozenset[str],
    report_timeout: float,
) -> None:
    """Run what is left of the schedule. Raises `CacheFault`: a part that is not in `may_fail` failed for an unknown reason."""
    writer = _ManifestWriter(Path(task.folder), task.shape, manifest)

    def changed() -> None:
        writer.update(schedule.complete, pool.unexplained)
        report(_progress(schedule))

    pool = WorkerPool(
        schedule,
        start_worker,
        workers=task.workers,
        changed=changed,
        may_fail=may_fail,
        report_timeout=report_timeout,
    )
    report(_progress(schedule))
    if not schedule.ended:
        await pool.run()
        await asyncio.to_thread(writer.rescan)
    report(_progress(schedule, ended=True))


class _ManifestWriter:
    """Saves the manifest after each part, so that an interrupted warm-up continues where it stopped."""

    def __init__(self, folder: Path, shape: str, manifest: Manifest) -> None:
        self._folder, self._shape, self._manifest = folder, shape, manifest

    def update(self, complete: Collection[str], unexplained: Collection[str]) -> None:
        """`unexplained`: parts that have failed without a known reason."""
        before = self._manifest
        failed = {*before.failed.get(self._shape, ()), *unexplained} - {*complete}
        manifest = with_parts(before, self._shape, complete, failed)
        if manifest != before:
            self._write(manifest, before.files)

    def rescan(self) -> None:
        """Read every file again; call it once all workers have ended."""
        self._write(self._manifest, {})

    def _write(self, manifest: Manifest, known: dict[str, tuple[int, int]]) -> None:
        self._manifest = msgspec.structs.replace(manifest, files=list_files(self._folder, known))
        try:
            save_manifest(self._folder, self._manifest)
        except OSError as error:
            log.warning("warm-up: the next start compiles again: cannot write %s: %s", self._folder, error.strerror)


def _schedule(task: WarmUpTask, parts: tuple[Part, ...], manifest: Manifest) -> PartSchedule:
    return PartSchedule(parts, manifest.parts.get(task.shape, ()))


def _progress(schedule: PartSchedule, *, waiting: bool = False, ended: bool = False) -> Progress:
    done, total = schedule.progress
    notes = [f"warm-up: {name} failed: {why}" for name, why in schedule.failed.items()]
    if waiting:
        notes.append(f"warm-up: {HELD}")
    return Progress(done, total, sorted(schedule.complete), notes, sorted(schedule.failed), waiting, ended)
