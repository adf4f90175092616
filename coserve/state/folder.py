"""The data folder: its paths, its lock, and leftovers of a crash.

registry.sqlite3                          jobs, events, adapters
lock                                      held by the daemon that uses the folder
reserve                                   space for writes on a full disk: `state.reserve`
cache/                                    compiled kernels, bytecode (`--cache-dir`); may be deleted
memory.json                               the GPU's memory profile; may be deleted
graphs.json                               measured GPU memory of CUDA graphs; may be deleted
tracking/                                 files of the trackers (`--tracking-dir`)
adapters/<id>/<version>/                  PEFT files of one immutable version; a + in its folder is a / in its id
files/<id>/                               an uploaded file and its record: `state.files`
batches/<id>/                             a batch of requests and its results: `api.openai.batches`
jobs/<job>/corpus.safetensors             the tokenised corpus
jobs/<job>/document.msgpack               a document in chunks, and beside it *.jsonl: questions, lessons, scores
jobs/<job>/checkpoint-<step>/             resumable state
sessions/<run>/<name>/                    a saved state of a client's training session; kept until it is deleted
staging/                                  uploads on their way; emptied at every start
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coserve.core.errors import DataFolderInUse, ForbiddenPath, StartupError, StorageError
from coserve.core.names import adapter_of_file, file_name, is_adapter_name, is_name
from coserve.core.types import AdapterRef
from coserve.state.durable import make_folder, read_errors, sweep, write_errors

log = logging.getLogger(__name__)

DOCUMENT = "document.msgpack"
_CHECKPOINT = re.compile(r"checkpoint-(\d{8,})")


class DataFolder:
    """Paths in the data folder. Names come from users, so they are checked here again. Raises `ForbiddenPath`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.database = self.root / "registry.sqlite3"
        self.adapters = self.root / "adapters"
        self.jobs = self.root / "jobs"
        self.sessions = self.root / "sessions"
        self.staging = self.root / "staging"
        self.files = self.root / "files"
        self.batches = self.root / "batches"
        self.memory = self.root / "memory.json"
        self.reserve = self.root / "reserve"
        self.tracking = self.root / "tracking"

    def adapter(self, ref: AdapterRef) -> Path:
        return self.adapters / file_name(_checked(ref.id, is_adapter_name)) / str(int(ref.version))

    def job(self, job_id: str) -> Path:
        return self.jobs / _checked(job_id)

    def corpus(self, job_id: str) -> Path:
        return self.job(job_id) / "corpus.safetensors"

    def document(self, job_id: str) -> Path:
        return self.job(job_id) / DOCUMENT

    def test(self, job_id: str) -> Path:
        return self.job(job_id) / "test.json"

    def session_state(self, run: str, name: str) -> Path:
        return self.sessions / _checked(run) / _checked(name)

    def checkpoint(self, job_id: str, step: int) -> Path:
        return self.job(job_id) / f"checkpoint-{step:08d}"

    def checkpoints(self, job_id: str) -> list[tuple[int, Path]]:
        """Step and folder of each complete checkpoint, by step. A folder gets this name only once it is durable. Raises
        `StorageError`."""
        job = self.job(job_id)
        with read_errors():
            found = [
                (int(match[1]), entry)
                for entry in (job.iterdir() if job.is_dir() else ())
                if (match := _CHECKPOINT.fullmatch(entry.name)) and entry.is_dir() and any(entry.iterdir())
            ]
        return sorted(found)

    def adapter_refs(self) -> list[AdapterRef]:
        """Adapter versions that have a folder."""
        return sorted(
            AdapterRef(adapter_of_file(name.name), int(version.name))
            for name in _folders(self.adapters)
            for version in _folders(name)
            if version.name.isascii() and version.name.isdigit()
        )

    def job_ids(self) -> list[str]:
        """Ids of jobs that have a folder."""
        return sorted(entry.name for entry in _folders(self.jobs))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder and lock it. Raises `DataFolderInUse`, or `StartupError` if it cannot be written or
        locked."""
        try:
            for folder in (self.root, self.adapters, self.files, self.jobs, self.sessions, self.staging):
                make_folder(folder)
            with write_errors():
                descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except StorageError as error:
            raise StartupError(f"data_dir: cannot write in {self.root}: {error.message}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise DataFolderInUse(f"data_dir: {self.root} belongs to a daemon that is running") from None
            raise StartupError(f"data_dir: cannot lock {self.root}: {error.strerror}") from error
        try:
            yield
        finally:
            os.close(descriptor)

    def restrict_access(self) -> None:
        """Make the folder accessible to its owner only; earlier versions left files that all users can read."""
        try:
            self.root.chmod(0o700)
        except PermissionError as error:
            log.warning("data_dir: others may be able to read it: %s", error.strerror)

    def sweep(self) -> list[str]:
        """Remove leftovers of unfinished writes; returns their names. Call it under the lock."""
        parents = self.adapters, self.batches, self.jobs, self.sessions
        folders = [self.root, self.files, *parents, *(own for parent in parents for own in _folders(parent))]
        found = [name for folder in folders for name in sweep(folder)]
        if self.staging.is_dir():
            found += [entry.name for entry in self.staging.iterdir()]
            shutil.rmtree(self.staging)
        make_folder(self.staging)
        return found


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return [entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith(".")]


def _checked(name: str, is_valid: Callable[[str], bool] = is_name) -> str:
    if not is_valid(name):
        raise ForbiddenPath("expected a name of letters, digits, '.', '_' and '-'")
    return name
