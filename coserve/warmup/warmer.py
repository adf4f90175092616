"""A whole warm-up: what the cache folder holds is checked, what is missing is compiled, the manifest is kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from coserve.warmup.crew import CacheFault, Crew, Worker
from coserve.warmup.manifest import Manifest, clear, completed, is_intact, list_files, load_manifest, save_manifest
from coserve.warmup.messages import Progress, Task
from coserve.warmup.parts import Part, Schedule

log = logging.getLogger(__name__)


async def warm(
    task: Task, parts: tuple[Part, ...], start: Callable[[], Awaitable[Worker]], tell: Callable[[Progress], None]
) -> None:
    """Complete all `parts`; `tell` hears of each change, the last time with `ended`.

    The folder is cleared and everything compiled anew where files have other contents than the manifest says, and once where
    a part fails without a known reason.
    """
    folder = Path(task.folder)
    manifest = load_manifest(folder, task.fields)
    if not await asyncio.to_thread(is_intact, folder, manifest):
        log.warning("warm-up: the cache in %s is damaged; it is made anew", folder)
        manifest = Manifest(task.fields)
    if not manifest.parts:
        await asyncio.to_thread(clear, folder)
    for suspect_cache in (True, False) if manifest.parts else (False,):  # what is new is not suspected
        schedule = Schedule(parts, manifest.parts.get(task.shape, ()))
        keeper = _Keeper(folder, task.shape, manifest)

        def changed(schedule: Schedule = schedule, keeper: _Keeper = keeper) -> None:
            keeper.keep(schedule.complete)
            tell(_progress(schedule))

        tell(_progress(schedule))
        try:
            if not schedule.ended:
                crew = Crew(schedule, start, workers=task.workers, changed=changed, suspect_cache=suspect_cache)
                await crew.run()
                await asyncio.to_thread(keeper.check)
            break
        except CacheFault as fault:
            log.warning("warm-up: %s; the cache in %s is made anew", fault, folder)
            await asyncio.to_thread(clear, folder)
            manifest = Manifest(task.fields)
    tell(_progress(schedule, ended=True))


class _Keeper:
    """Writes the manifest whenever a part is complete, so that a start that is interrupted is not lost."""

    def __init__(self, folder: Path, shape: str, manifest: Manifest) -> None:
        self._folder, self._shape, self._manifest = folder, shape, manifest

    def keep(self, parts: frozenset[str]) -> None:
        if parts - frozenset(self._manifest.parts.get(self._shape, ())):
            self._write(completed(self._manifest, self._shape, parts), self._manifest.files)

    def check(self) -> None:
        """Once all processes have ended: reads every file again."""
        self._write(self._manifest, {})

    def _write(self, manifest: Manifest, known: dict[str, tuple[int, int]]) -> None:
        self._manifest = Manifest(manifest.fields, manifest.parts, list_files(self._folder, known))
        try:
            save_manifest(self._folder, self._manifest)
        except OSError as error:
            log.warning("warm-up: the next start begins anew: %s cannot be written: %s", self._folder, error.strerror)


def _progress(schedule: Schedule, *, ended: bool = False) -> Progress:
    done, total = schedule.progress
    failed = [f"warm-up: {name} failed: {why}" for name, why in schedule.failed.items()]
    return Progress(done, total, sorted(schedule.complete), failed, sorted(schedule.failed), ended)
