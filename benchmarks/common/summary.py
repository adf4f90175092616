"""`summary.json`: the latest value of each key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

Key = tuple[float, str, object, Mapping[str, Any]]
"""Value, unit, target (None: none), and the row that gives the date, and the note if it has one."""


def update_summary(
    out: Path,
    script: str,
    result: str,
    found: Mapping[str, Key],
    more: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Print these keys, and put them into `summary.json` in `out`; other keys stay. `script`, `result`: files below
    `benchmarks/` and `benchmarks/results/`; `more`: further fields of some keys."""
    path = out / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    for key, (value, unit, target, row) in found.items():
        print(key, value, unit, "" if target is None else target, flush=True)
        summary[key] = {"value": value, "unit": unit, "target": None if target is None else str(target)}
        summary[key] |= {"script": f"benchmarks/{script}", "result": f"benchmarks/results/{result}"}
        summary[key] |= {name: row[name] for name in ("date", "note") if name in row} | dict(more.get(key, {}))
    path.write_text(json.dumps(dict(sorted(summary.items())), indent=1) + "\n")
