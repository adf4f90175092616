"""Results of a run of the documents' benchmark so far: on disk after each arm, so that an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.documents.arms import Row


class Measured:
    """Rows of answers, and the record of each job that ended: recipe, phases, evaluation, seconds."""

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        """Read what the file at `path` has, if there is one. `settings`: those that change what a row means; exits if
        the file's are others."""
        self._path, self._settings = path, dict(settings)
        self.rows, self.jobs = list[Row](), list[dict[str, Any]]()
        if path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != self._settings:
                raise SystemExit(f"{path} is of other settings: expected {self._settings}, got {found['settings']}")
            self.rows, self.jobs = [Row(**row) for row in found["rows"]], found["jobs"]

    def has(self, seed: int, document: str, arm: str) -> bool:
        """Whether the document's questions were asked of this arm."""
        return any((row.seed, row.document, row.arm) == (seed, document, arm) for row in self.rows)

    def save(self) -> None:
        """Write all that is there, in place of what was."""
        found = {"settings": self._settings, "rows": [asdict(row) for row in self.rows], "jobs": self.jobs}
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(self._path)
