"""Rows of the serving benchmarks in one file, each of its own run, and the summary's keys that follow from them.

    python -m benchmarks.serving_results [FOLDER/serving.json ...]

takes in the rows of the files named (results that another machine made), then brings `summary.json` up to date.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results")
RETENTION = "serving.lora_retention.a32"
PARTS = ("serving.out_tok_s.512x128.a32", "serving.out_tok_s.512x128.a0")
"""What the retention is the ratio of."""


@dataclass(frozen=True)
class Target:
    """What a row should reach; `most`: at most the value, else at least."""

    value: float
    most: bool = False

    def __str__(self) -> str:
        return f"{'<=' if self.most else '>='} {self.value:g}"

    def reached(self, value: float) -> bool:
        return value <= self.value if self.most else value >= self.value


def commit() -> tuple[str, str | None]:
    """The commit of the tree that runs, and what keeps its results from describing that commit."""
    if shutil.which("git") is None:
        return "unknown", "the commit was not recorded"
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown", "the commit was not recorded"
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", "coserve", "benchmarks/*.py"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return head.stdout.strip(), "measured on a tree that was not clean" if changed.stdout.strip() else None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "aiohttp", "msgspec", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Results:
    """A file of rows by key: what this run finds is written at once, what earlier runs found stays.

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

    def put(
        self,
        key: str,
        value: float,
        unit: str,
        target: Target | None = None,
        values: Sequence[float] = (),
        about: Mapping[str, object] | None = None,
    ) -> None:
        """`values`: of the repeats that `value` is the median of. `about`: whatever else the row should say."""
        row: dict[str, Any] = {"value": value, "unit": unit}
        if values:
            row |= {"low": round(min(values), 4), "high": round(max(values), 4), "repeats": len(values)}
        row |= {"target": None if target is None else str(target)}
        row |= {"reached": None if target is None else target.reached(value)}
        row |= {"commit": self._commit, "date": self._date, "run": self._date}
        if self._note is not None:
            row["note"] = self._note
        print(key, json.dumps({name: row[name] for name in ("value", "unit", "target", "reached")}), flush=True)
        _merge(self._path, {self._date: self._run}, {key: row | dict(about or {})})

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the file."""
        return list(json.loads(self._path.read_text())["rows"].values()) if self._path.exists() else []


def command(script: str) -> str:
    """How this was called, without where it wrote to."""
    hidden = {"--out", "--commit", "--scratch"}
    pairs = zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    return " ".join([f"python -m {script}", *(arg for before, arg in pairs if not {arg, before} & hidden)])


def _merge(path: Path, runs: dict[str, Any], rows: dict[str, Any]) -> None:
    """The newest row of a key stays, and the runs that rows are of."""
    record = json.loads(path.read_text()) if path.exists() else {"runs": {}, "rows": {}}
    for key, row in rows.items():
        if key not in record["rows"] or record["rows"][key]["date"] <= row["date"]:
            record["rows"][key] = row
    named = {row["run"] for row in record["rows"].values()}
    record["runs"] = {run: about for run, about in (record["runs"] | runs).items() if run in named}
    record["rows"] = dict(sorted(record["rows"].items()))
    path.write_text(json.dumps(record, indent=1) + "\n")


def take_in(file: Path, out: Path = RESULTS) -> None:
    """The rows of a result that another machine made, into the file of the same name."""
    record = json.loads(file.read_text())
    _merge(out / file.name, record["runs"], record["rows"])


def summarize(out: Path = RESULTS) -> None:
    """The keys of `serving.json` in `summary.json`: of every row, and the retention where both its rows are there.

    A note goes with its row: what was measured again at a known commit has none.
    """
    record = json.loads((out / "serving.json").read_text())
    rows, runs = record["rows"], record["runs"]
    path = out / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    about = {"script": "benchmarks/serving.py", "result": "benchmarks/results/serving.json"}
    for key, row in rows.items():
        entry = {name: row[name] for name in ("value", "unit", "target")} | about
        entry |= {"script": runs[row["run"]].get("script", about["script"]), "date": row["date"]}
        summary[key] = entry | ({"note": row["note"]} if "note" in row else {})
    if all(part in rows for part in PARTS):
        many, none = (rows[part] for part in PARTS)
        entry = {"value": round(many["value"] / none["value"], 4), "unit": "fraction", "target": str(Target(0.85))}
        entry |= about | {"date": max(many["date"], none["date"])}
        if many["commit"] != none["commit"]:
            entry["note"] = f"of two runs: commits {many['commit'][:7]} and {none['commit'][:7]}"
        summary[RETENTION] = entry
    path.write_text(json.dumps(dict(sorted(summary.items())), indent=1) + "\n")


def main() -> None:
    for name in sys.argv[1:]:
        take_in(Path(name))
    summarize()


if __name__ == "__main__":
    main()
