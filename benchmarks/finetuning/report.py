"""Keys of `finetuning.json`, and its table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.options import RESULTS
from benchmarks.common.results import summarize
from benchmarks.finetuning.cases import OURS, PEFT_MODES

FILE = "finetuning.json"

Rows = Mapping[str, Mapping[str, Any]]


def published(rows: Rows) -> dict[str, Mapping[str, Any]]:
    """What goes into the summary."""
    return {key: row for key, row in rows.items() if "oom" not in row}


def table(rows: Rows) -> str:
    """Tokens a second and GiB of each side, in Markdown."""
    sides = [*PEFT_MODES, OURS]
    found = {(row["case"], row["side"]): row for row in rows.values() if row["unit"] == "tok/s"}
    lines = [f"| | {' | '.join(sides)} |", "|---" * (len(sides) + 1) + "|"]
    for case in dict.fromkeys(case for case, _ in found):
        cells = [_cell(found.get((case, side))) for side in sides]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if "oom" in row:
        return "does not fit"
    memory = f", {row['gib_allocated']:.1f} GiB" if "gib_allocated" in row else ""
    return f"{row['value']:.0f}{memory}"


def publish(out: Path = RESULTS) -> None:
    """Update `summary.json` from the result in `out`, and print the table."""
    rows = json.loads((out / FILE).read_text())["rows"]
    summarize(FILE, out, published(rows))
    print(table(rows))
