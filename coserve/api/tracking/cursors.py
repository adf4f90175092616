"""How far a tracker has been told of each job: small files, so that a restarted daemon goes on where the last one
stopped."""

from __future__ import annotations

from pathlib import Path

import msgspec

from coserve.core.names import is_name
from coserve.core.validation import decoder_of


class Cursor(msgspec.Struct, frozen=True):
    """The last event and the last optimizer step that the tracker has been told of."""

    seq: int = 0
    step: int = 0


class Cursors:
    """One file for each job that the tracker has not been told the end of.

    Files are replaced, not synced: after a power cut a tracker may be told steps again, which its sink keeps once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def jobs(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.json") if is_name(path.stem))

    def read(self, job: str) -> Cursor:
        """The job's cursor; for a job without one, it is created."""
        try:
            return decoder_of(Cursor).decode(self._path(job).read_bytes())
        except FileNotFoundError:
            self.write(job, cursor := Cursor())
            return cursor
        except (msgspec.ValidationError, msgspec.DecodeError):
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
