"""Backs up a data folder while its daemon runs, and restores a backup.

The registry is copied first, by SQLite's backup; then the files that its rows name. Files of a version, an upload or a
checkpoint never change once they have their names, so a copy is consistent unless one was deleted meanwhile: then the
registry is copied again, and what it names now is added. Files that the copied registry does not name are removed by
the next start.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from coserve.core.errors import ConfigError, StorageBusy
from coserve.core.types import Wire
from coserve.core.validation import decode_json
from coserve.state.durable import fsync_path, make_folder, move_file, replace_dir, write_errors, write_file
from coserve.state.folder import DataFolder
from coserve.state.registry.database import database_errors
from coserve.state.registry.records import JobRecord
from coserve.state.registry.registry import Registry

MARK: Final = "backup.json"
"""Written last: a copy without it is not complete."""
ATTEMPTS: Final = 10
POINT: Final = "backup"


class Backup(Wire, frozen=True):
    """Contents of a copy, and when its registry was copied (seconds since the epoch)."""

    created_at: float
    adapters: int
    """Versions of adapters."""
    jobs: int
    """Unfinished jobs, with their last checkpoints."""
    files: int
    bytes: int


def back_up(data: Path, target: Path, clock: Callable[[], float] = time.time) -> Backup:
    """Copy the data folder `data` to the new folder `target`; durable when this returns.

    Raises `ConfigError` if `data` has no registry or `target` is not empty, `StorageBusy` if files are deleted faster
    than they are copied, and `StorageError`.
    """
    source, copy = DataFolder(data), DataFolder(target)
    if not source.database.is_file():
        raise ConfigError(f"data_dir: {source.root} has no registry")
    _check_empty(copy.root)
    copy.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (copy.adapters, copy.files, copy.jobs):
        make_folder(folder)
    for _ in range(ATTEMPTS):
        created_at = clock()
        _copy_registry(source.database, copy.database)
        with closing(Registry(copy.database)) as registry:
            adapters, jobs = registry.adapter_refs(), registry.unfinished()
        wanted = [source.adapter(ref) for ref in adapters]
        wanted += source.sessions.glob("*/[!.]*")
        wanted += [found for record in jobs for found in _of_job(source, record)]
        wanted += source.batches.glob("[!.]*")
        try:
            for path in wanted:
                _copy(path, copy.root / path.relative_to(source.root))
            for path in source.files.glob("[!.]*"):  # last: a batch that ends during the copy names new files
                _copy(path, copy.root / path.relative_to(source.root))
        except FileNotFoundError:
            continue  # deleted meanwhile
        size = sum(path.stat().st_size for path in copy.root.rglob("*") if path.is_file())
        files = sum(1 for _ in copy.files.iterdir())
        made = Backup(created_at=created_at, adapters=len(adapters), jobs=len(jobs), files=files, bytes=size)
        write_file(copy.root / MARK, msgspec.json.encode(made), point=POINT)
        return made
    raise StorageBusy("files were deleted while they were copied, again and again; try again later")


def restore(backup: Path, data: Path) -> Backup:
    """Make a data folder of a copy; durable when this returns.

    Raises `ConfigError` if `backup` is not a complete copy or `data` is not empty, `StartupError` for a damaged
    registry, and `StorageError`.
    """
    try:
        made = decode_json((backup / MARK).read_bytes(), Backup)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        raise ConfigError(f"{backup} is not a complete backup: it has no {MARK}") from None
    _check_empty(data)
    with closing(Registry(backup / "registry.sqlite3")) as registry:
        registry.check()
    with replace_dir(data.absolute(), point=POINT) as temp:
        temp.chmod(0o700)
        shutil.copytree(backup, temp, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MARK, "*-wal", "*-shm"))
    return made


def _check_empty(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: expected a new or empty folder")


def _copy_registry(source: Path, target: Path) -> None:
    """Copy the registry while the daemon writes to it. The connection to the source only reads."""
    temp = target.with_name(f".tmp-{target.name}")
    with database_errors(), closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as read:
        temp.unlink(missing_ok=True)
        with closing(sqlite3.connect(temp)) as write:
            read.backup(write)
    with write_errors():
        fsync_path(temp)
    move_file(temp, target, point=POINT)


def _of_job(source: DataFolder, record: JobRecord) -> Iterator[Path]:
    """Yield the files of a job to copy: its corpus (for a document: chunks, questions and answers) and its complete
    checkpoints."""
    id = record.spec.id
    if record.document is None:
        yield source.corpus(id)
        if source.test(id).exists():
            yield source.test(id)
    else:
        yield source.document(id)
        checkpoints = {path for _, path in source.checkpoints(id)}
        yield from (path for path in source.job(id).glob("[!.]*") if path not in checkpoints)
    yield from (path for _, path in source.checkpoints(id))


def _copy(path: Path, target: Path) -> None:
    """Copy a file or folder, unless `target` exists already. Raises `FileNotFoundError` if `path` is gone."""
    if target.exists():
        return
    make_folder(target.parent)
    if path.is_dir():
        gone = False
        with replace_dir(target, point=POINT) as temp:
            try:
                shutil.copytree(path, temp, dirs_exist_ok=True)
            except (FileNotFoundError, shutil.Error) as error:
                if path.exists() and not _vanished(error):
                    raise  # the disk's error
                gone = True
        if gone:
            shutil.rmtree(target)
            raise FileNotFoundError(path)
        return
    temp = target.with_name(f".tmp-{target.name}")
    shutil.copyfile(path, temp)
    with write_errors():
        fsync_path(temp)
    move_file(temp, target, point=POINT)


def _vanished(error: FileNotFoundError | shutil.Error) -> bool:
    """Whether every file that could not be copied is gone by now, for example because a batch replaced it."""
    return isinstance(error, FileNotFoundError) or not any(Path(source).exists() for source, *_ in error.args[0])
