"""A whole warm-up: check what the cache folder holds, compile what is missing, keep the manifest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from coserve.warmup.lock import CacheLock
from coserve.warmup.manifest import (
    Manifest,
    clear_cache,
    is_intact,
    list_files,
    load_manifest,
    save_manifest,
    with_parts,
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
    without a known reason. While another warm-up holds the folder, the parts that it completes are reported; what is
    then still missing is compiled when it has ended. `report_timeout`: see `WorkerPool`.
    """
    folder = Path(task.folder)
    with closing(CacheLock(folder)) as lock:
        if not lock.acquire_now():

            def schedule() -> PartSchedule:
                return _schedule(task, parts, load_manifest(folder, task.fields))

            if schedule().ended:
                report(_progress(schedule(), ended=True))
                return
            log.info("warm-up: %s", HELD)
            with watch_renames(folder, lambda: report(_progress(schedule(), waiting=True))):
                report(_progress(schedule(), waiting=True))
                await lock.acquire()
        await _compile_missing(task, parts, start_worker, report, report_timeout)


async def _compile_missing(
    task: WarmUpTask,
    parts: tuple[Part, ...],
    start_worker: Callable[[], Awaitable[Worker]],
    report: Callable[[Progress], None],
    report_timeout: float,
) -> None:
    """`warm`, while this process holds the folder's lock."""
    folder = Path(task.folder)
    manifest = load_manifest(folder, task.fields)
    if not await asyncio.to_thread(is_intact, folder, manifest):
        log.warning("warm-up: the cache in %s is damaged; it is built again", folder)
        manifest = Manifest(task.fields)
    if not manifest.parts:
        await asyncio.to_thread(clear_cache, folder)
    for suspect_cache in (True, False) if manifest.parts else (False,):  # a cache built now is not suspected
        schedule = _schedule(task, parts, manifest)
        writer = _ManifestWriter(folder, task.shape, manifest)

        def changed(schedule: PartSchedule = schedule, writer: _ManifestWriter = writer) -> None:
            writer.add_parts(schedule.complete)
            report(_progress(schedule))

        report(_progress(schedule))
        pool = WorkerPool(
            schedule,
            start_worker,
            workers=task.workers,
            changed=changed,
            suspect_cache=suspect_cache,
            report_timeout=report_timeout,
        )
        try:
            if not schedule.ended:
                await pool.run()
                await asyncio.to_thread(writer.rescan)
            break
        except CacheFault as fault:
            log.warning("warm-up: %s; the cache in %s is built again", fault, folder)
            await asyncio.to_thread(clear_cache, folder)
            manifest = Manifest(task.fields)
    report(_progress(schedule, ended=True))


class _ManifestWriter:
    """Saves the manifest after each part, so that an interrupted warm-up continues where it stopped."""

    def __init__(self, folder: Path, shape: str, manifest: Manifest) -> None:
        self._folder, self._shape, self._manifest = folder, shape, manifest

    def add_parts(self, parts: frozenset[str]) -> None:
        if parts - frozenset(self._manifest.parts.get(self._shape, ())):
            self._write(with_parts(self._manifest, self._shape, parts), self._manifest.files)

    def rescan(self) -> None:
        """Read every file again; call it once all workers have ended."""
        self._write(self._manifest, {})

    def _write(self, manifest: Manifest, known: dict[str, tuple[int, int]]) -> None:
        self._manifest = Manifest(manifest.fields, manifest.parts, list_files(self._folder, known))
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
