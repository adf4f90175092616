"""Records, in small files, up to which event each job was sent to a tracker, so that a restarted daemon continues
there."""

from __future__ import annotations

from pathlib import Path

import msgspec

from coserve.core.names import is_name
from coserve.core.validation import decode_json


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
        except msgspec.DecodeError:
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
