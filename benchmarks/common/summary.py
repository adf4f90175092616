"""`summary.json`: the latest value of each key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def update_summary(out: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace these keys of `summary.json` in `out`; other keys stay."""
    path = out / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(dict(sorted((summary | dict(entries)).items())), indent=1) + "\n")


def entry(
    row: Mapping[str, Any], *, value: float, unit: str, target: str | None, script: str, result: str
) -> dict[str, Any]:
    """One key: `row` gives the date, and the note if it has one. `script` and `result` are file names."""
    found = {"value": value, "unit": unit, "target": target, "script": f"benchmarks/{script}"}
    found |= {"result": f"benchmarks/results/{result}", "date": row["date"]}
    return found | ({"note": row["note"]} if "note" in row else {})
