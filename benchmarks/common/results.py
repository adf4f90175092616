"""Result files: rows by key, each with its own run, and their keys in `summary.json`.

    python -m benchmarks.common.results FOLDER/FILE.json ...

merges the rows of the named files (results of another machine), then updates `summary.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common.options import RESULTS
from benchmarks.common.provenance import command, commit, machine, module_of, versions
from benchmarks.common.summary import Key, update_summary


@dataclass(frozen=True)
class Target:
    """Target of a row: at most `value` if `most`, else at least."""

    value: float
    most: bool = False

    def __str__(self) -> str:
        return f"{'<=' if self.most else '>='} {self.value:g}"

    def reached(self, value: float) -> bool:
        return value <= self.value if self.most else value >= self.value


class Results:
    """A file of rows by key. Each row is written as soon as it is measured; rows of earlier runs stay.

    A row is {value, unit, low, high, target, reached, commit, date, run, note?, ...}; `run` names an entry of `runs`,
    which has script, hardware, versions, command, seed and settings.
    """

    def __init__(
        self, out: Path, name: str, *, script: str, hardware: str, seed: int, revision: str, settings: dict[str, Any]
    ) -> None:
        """`revision`: the commit, where there is no repository to ask."""
        out.mkdir(parents=True, exist_ok=True)
        self._path = out / name
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._commit, self._note = (revision, None) if revision else commit()
        self._run = {
            "hardware": hardware,
            "versions": versions(),
            "script": script.replace(".", "/") + ".py",
            "command": command(script),
            "seed": seed,
            "settings": settings,
        }

    @classmethod
    def of(
        cls,
        options: argparse.Namespace,
        name: str,
        script: str,
        settings: dict[str, Any],
        *,
        seed: int = 0,
        hardware: str | None = None,
    ) -> Results:
        """The file `name` in the folder that the options of `make_parser` give. `script`: `__file__` of what measures;
        `hardware`: None: `machine` says it."""
        return cls(
            options.out,
            name,
            script=module_of(script),
            hardware=hardware or machine(tiny=getattr(options, "tiny", False)),
            seed=seed,
            revision=options.commit,
            settings=settings,
        )

    def put(
        self,
        key: str,
        value: float,
        unit: str,
        target: Target | None = None,
        values: Sequence[float] = (),
        about: Mapping[str, object] | None = None,
    ) -> None:
        """`values`: the repeats whose median is `value`. `about`: further fields of the row."""
        row: dict[str, Any] = {"value": value, "unit": unit}
        if values:
            row |= {"low": round(min(values), 4), "high": round(max(values), 4), "repeats": len(values)}
        row |= {"target": None if target is None else str(target)}
        row |= {"reached": None if target is None else target.reached(value)}
        row |= {"commit": self._commit, "date": self._date, "run": self._date}
        if self._note is not None:
            row["note"] = self._note
        _merge(self._path, {self._date: self._run}, {key: row | dict(about or {})})
        print(key, json.dumps({name: row[name] for name in ("value", "unit", "target", "reached")}), flush=True)

    def keys(self) -> set[str]:
        """Of all rows of the file."""
        return set(json.loads(self._path.read_text())["rows"]) if self._path.exists() else set()

    def row(self, key: str) -> dict[str, Any] | None:
        """The row of a key, if it is of the same commit."""
        rows = json.loads(self._path.read_text())["rows"] if self._path.exists() else {}
        found: dict[str, Any] | None = rows.get(key)
        return found if found is not None and found["commit"] == self._commit else None

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the file."""
        return list(json.loads(self._path.read_text())["rows"].values()) if self._path.exists() else []


def _merge(path: Path, runs: dict[str, Any], rows: dict[str, Any]) -> None:
    """Keep the newest row of each key, and the runs that rows name."""
    record = json.loads(path.read_text()) if path.exists() else {"runs": {}, "rows": {}}
    for key, row in rows.items():
        if key not in record["rows"] or record["rows"][key]["date"] <= row["date"]:
            record["rows"][key] = row
    named = {row["run"] for row in record["rows"].values()}
    record["runs"] = {run: about for run, about in (record["runs"] | runs).items() if run in named}
    record["rows"] = dict(sorted(record["rows"].items()))
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def merge_results(file: Path, out: Path = RESULTS) -> None:
    """Merge the rows of a result of another machine into the file of the same name."""
    record = json.loads(file.read_text())
    _merge(out / file.name, record["runs"], record["rows"])


def summarize(file: str, out: Path = RESULTS, keys: Collection[str] | None = None) -> None:
    """Update `summary.json` with the rows of a result: every row is a key, or only `keys`.

    A note goes with its row: a key measured again at a known commit has none.
    """
    record = json.loads((out / file).read_text())
    rows, runs = record["rows"], record["runs"]
    by_script = defaultdict[str, dict[str, Key]](dict)
    for key, row in rows.items():
        if keys is None or key in keys:
            script = runs[row["run"]].get("script", "benchmarks/serving/in_process.py").removeprefix("benchmarks/")
            by_script[script][key] = row["value"], row["unit"], row["target"], row
    for script, found in by_script.items():
        update_summary(out, script, file, found)


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        merge_results(path)
        summarize(path.name)


if __name__ == "__main__":
    main()
