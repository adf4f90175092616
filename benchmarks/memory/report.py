"""What the mixes of `memory_mixes.json` say: quantiles of the errors, and the keys in summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.options import RESULTS
from benchmarks.common.summary import Key, update_summary

NAME = "memory_mixes.json"


def summary(rows: Sequence[dict[str, Any]], out_of_memory: int) -> dict[str, float]:
    """Quantiles of the absolute errors."""
    found: dict[str, float] = {"mixes": len(rows), "oom": out_of_memory}
    for name in ("error", "error_of_mix"):
        own = sorted(abs(row[name]) for row in rows)
        for quantile in (50, 90, 99):
            found[f"{name}.p{quantile}"] = own[min(len(own) - 1, len(own) * quantile // 100)] if own else 0.0
        found[f"{name}.max"] = own[-1] if own else 0.0
    found["jobs"] = sum(len(row["jobs"]) for row in rows)
    found["jobs_recomputed"] = sum(job[3] > 0 for row in rows for job in row["jobs"])
    return found | {"jobs_waiting": sum(row["waiting"] for row in rows)}


def merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of several seeds at one commit as one; the first tells of the rest."""
    first, commits = found[0], {each["run"]["commit"] for each in found}
    if len(commits) > 1:
        raise SystemExit(f"expected results of one commit, got {', '.join(sorted(commits))}")
    rows = [row for each in found for row in each["mixes"]]
    return first | {"summary": summary(rows, sum(each["summary"]["oom"] for each in found)), "mixes": rows}


def publish(paths: Sequence[Path]) -> None:
    """Take the results in, and update the keys in summary.json."""
    content = merged([json.loads(path.read_text()) for path in paths])
    (RESULTS / NAME).write_text(json.dumps(content) + "\n")
    found = content["summary"]
    values: dict[str, Key] = {
        "memory.error.p99": (found["error.p99"], "share", "at most 0.03", content["run"]),
        "memory.error_of_mix.p99": (found["error_of_mix.p99"], "share", None, content["run"]),
        "memory.oom": (found["oom"], "mixes", "0 of 1000", content["run"]),
    }
    update_summary(RESULTS, "memory/mixes.py", NAME, values)
