"""Files that are old or new after a crash, never partial: write a temporary file, fsync, rename, fsync the folder.

A rename is atomic but not durable until its folder is synced, and a file's content is not durable until the file is.
Leftovers of a crash, and of deletions that the machine refused, have names that start with a dot; `sweep` removes them:

- `.tmp-NAME-*`: not finished: removed;
- `.trash-NAME-*`: being deleted: removed;
- `.old-NAME`: the old NAME while it is being replaced: renamed back if NAME is missing, removed otherwise.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from coserve.core.errors import StorageBusy, StorageError, StorageFailed, StorageFull
from coserve.state.failpoints import failpoint

log = logging.getLogger(__name__)

TEMP, TRASH, OLD = ".tmp-", ".trash-", ".old-"


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
FAILED = frozenset({errno.EIO, errno.EROFS})
BUSY = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.EAGAIN,
        errno.EINTR,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.ENOLCK,
        errno.EBUSY,
        errno.ESTALE,
    }
)


def storage_error(number: int | None) -> StorageError | None:
    """The error for an `errno` of the disk or the system; None for one of the file itself, such as ENOENT or ELOOP."""
    if number in FULL:
        return StorageFull("the disk is full")
    if number in FAILED:
        return StorageFailed(f"the disk failed: {os.strerror(number)}")
    if number in BUSY:
        return StorageBusy(f"the machine cannot do this now: {os.strerror(number)}")
    return None


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise errors of the disk or the system as `StorageFull`, `StorageFailed` or `StorageBusy`; others unchanged."""
    try:
        yield
    except OSError as error:
        if (typed := storage_error(error.errno)) is not None:
            raise typed from error
        raise
    except SafetensorError as error:  # the safetensors writer reports the errno as text
        found = re.search(r"os error (\d+)", str(error))
        if found is not None and (typed := storage_error(int(found[1]))) is not None:
            raise typed from error
        raise


@contextmanager
def write_errors() -> Iterator[None]:
    """Raise every `OSError` of writes and deletions of the daemon's own files as a `StorageError`. No user named these
    files, so the cause is the machine, such as a network file system that is away."""
    try:
        with disk_errors():
            yield
    except OSError as error:
        raise _refused(error) from error


@contextmanager
def read_errors() -> Iterator[None]:
    """Do as `write_errors`, for reads of the daemon's own files; a missing file stays a `FileNotFoundError`."""
    try:
        with disk_errors():
            yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _refused(error) from error


def _refused(error: OSError) -> StorageFailed:
    return StorageFailed(f"the machine refused a file: {error.strerror or type(error).__name__}")


@contextmanager
def safetensors_errors(path: Path) -> Iterator[None]:
    """`read_errors` for a safetensors reader, which reports every file that it cannot open as missing."""
    try:
        with read_errors():
            yield
    except FileNotFoundError as error:
        if error.errno is not None:
            raise
        with read_errors():
            path.open("rb").close()
        raise StorageBusy("the machine could not open a file") from error


def fsync_path(path: Path) -> None:
    """Make a file's content, or a folder's entries, durable (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, each durably. An existing folder is fine. Raises `StorageError`."""
    with write_errors():
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            fsync_path(folder.parent)


def write_file(path: Path, data: bytes, *, point: str) -> None:
    """Write `data` to `path`. After a crash or an error the file is the old one or the new one.

    `point` prefixes the failpoints of the steps (`failpoints.FILE_STEPS`). Raises `StorageError`.
    """
    make_folder(path.parent)
    temp = _temporary_path(path, TEMP)
    with write_errors():
        try:
            with temp.open("xb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                failpoint(f"{point}.temp_write")
                file.write(data[len(data) // 2 :])
                file.flush()
                failpoint(f"{point}.before_file_fsync")
                os.fsync(file.fileno())
            failpoint(f"{point}.after_file_fsync")
            failpoint(f"{point}.before_rename")
            temp.replace(path)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        failpoint(f"{point}.after_rename")
        fsync_path(path.parent)
        failpoint(f"{point}.after_dir_fsync")


def move_file(source: Path, path: Path, *, point: str) -> None:
    """Rename a durable file to `path` on the same file system, durably. `point` as for `write_file`.

    Raises `StorageError`.
    """
    make_folder(path.parent)
    with write_errors():
        failpoint(f"{point}.before_rename")
        source.replace(path)
        failpoint(f"{point}.after_rename")
        fsync_path(path.parent)
        failpoint(f"{point}.after_dir_fsync")


@contextmanager
def replace_dir(target: Path, *, point: str) -> Iterator[Path]:
    """Yields a folder to fill. At the end of the block it becomes `target`, complete and durable.

    An error in the block or after it leaves `target` unchanged. `point` as for `write_file`. Raises `StorageError`,
    also for an `OSError` in the block, and what else the block raises.
    """
    make_folder(target.parent)
    temp = _temporary_path(target, TEMP)
    with write_errors():
        try:
            temp.mkdir()
            yield temp
            failpoint(f"{point}.temp_write")
            failpoint(f"{point}.before_file_fsync")
            _fsync_tree(temp)
            failpoint(f"{point}.after_file_fsync")
            _swap_in(temp, target, point)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise


def _swap_in(temp: Path, target: Path, point: str) -> None:
    """Rename `temp` to `target`, replacing it; on an error, restore both."""
    old = target.with_name(OLD + target.name)
    replaces = target.exists()
    try:
        failpoint(f"{point}.before_rename")
        if replaces:
            target.rename(old)
        temp.rename(target)
        failpoint(f"{point}.after_rename")
        fsync_path(target.parent)
        failpoint(f"{point}.after_dir_fsync")
    except BaseException:
        if not temp.exists():
            target.rename(temp)
        if old.exists():
            old.rename(target)
        raise
    if replaces:
        shutil.rmtree(old, ignore_errors=True)  # leftovers are removed by `sweep`


def remove_dir(target: Path) -> None:
    """Delete a folder: rename it durably, then delete its files. A missing folder is fine. Raises `StorageError` where
    it cannot be renamed; files that cannot be deleted are left to `sweep`."""
    trash = _temporary_path(target, TRASH)
    with write_errors():
        failpoint("remove.before_rename")
        try:
            target.rename(trash)
        except FileNotFoundError:
            return
        fsync_path(target.parent)
    with _later(target.parent):
        failpoint("remove.after_rename")
        shutil.rmtree(trash)


async def remove_unlisted(target: Path, what: str) -> None:
    """Delete a folder whose row in the registry is gone. Where that fails, the next start does it; `what` names the
    folder's owner in the log."""
    try:
        await asyncio.to_thread(remove_dir, target)
    except (OSError, StorageError) as error:
        log.warning("%s: its files stay until the next start: %s", what, error)


def sweep(folder: Path) -> list[str]:
    """Remove or restore leftovers directly inside `folder`; returns their names. Those that cannot be removed now stay
    for the next call. Nothing may be written there meanwhile. Raises `StorageError`."""
    found: list[str] = []
    with write_errors():
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not entry.name.startswith((OLD, TEMP, TRASH)):
                continue
            target = entry.with_name(entry.name.removeprefix(OLD))
            if entry != target and not target.exists():
                entry.rename(target)
                found.append(entry.name)
                continue
            with _later(folder):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
                found.append(entry.name)
        if found:
            fsync_path(folder)
    return found


@contextmanager
def _later(folder: Path) -> Iterator[None]:
    """Leave files that cannot be deleted now to a later `sweep` of `folder`: nobody needs them, so no caller waits."""
    try:
        yield
    except OSError as error:
        log.warning("deleted files in %s stay for now, until they can be removed: %s", folder.name, error.strerror)


def _temporary_path(path: Path, prefix: str) -> Path:
    return path.with_name(f"{prefix}{path.name}-{secrets.token_hex(4)}")


def _fsync_tree(root: Path) -> None:
    """Sync the files of a tree, then its folders, innermost first."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))
