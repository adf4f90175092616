"""Run one benchmark in two source trees on one machine, in turn, and compare the numbers.

    python -m benchmarks.common.compare_trees BEFORE AFTER --out FILE -- -m benchmarks.serving.in_process --only ...

BEFORE and AFTER are folders with the whole repository. The command runs in each, with `--out` added. FILE gets each
key's value in both, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(tree: Path, command: list[str]) -> dict[str, Any]:
    """Run the command in `tree`; returns the rows that it writes, and their runs."""
    with tempfile.TemporaryDirectory() as out:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        subprocess.run([sys.executable, *command, "--out", out], cwd=tree, env=environment, check=True)
        found: dict[str, Any] = {"rows": {}, "runs": {}}
        for file in Path(out).glob("*.json"):
            content = json.loads(file.read_text())
            if not isinstance(content, dict) or "rows" not in content:
                continue
            if isinstance(content["rows"], list):
                found["rows"] |= kernel_rows(content["rows"])
                found["runs"][file.name] = {name: value for name, value in content.items() if name != "rows"}
            else:
                found["rows"] |= content["rows"]
                found["runs"] |= content["runs"]
    return found


def kernel_rows(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows of `benchmarks.kernels.lora` as rows by key; only parts whose rows have a timing for each method."""
    return {
        f"{row.get('case', row.get('group'))}.{method}": {"value": timing["us"], "unit": "us", **timing}
        for row in rows
        for method, timing in row["us"].items()
        if isinstance(timing, dict)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--before-command", help="the command in BEFORE, where it has another name there")
    parser.add_argument("--commits", default="", help="the two revisions, with a comma")
    split = sys.argv.index("--")
    options, command = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    earlier = command if options.before_command is None else shlex.split(options.before_command)
    found = {
        "before": run(options.before.resolve(), earlier),
        "after": run(options.after.resolve(), command),
    }
    rows = {
        key: {
            "before": row["value"],
            "after": found["after"]["rows"][key]["value"],
            "ratio": round(found["after"]["rows"][key]["value"] / row["value"], 4),
            "unit": row["unit"],
            **{f"{name}_{end}": found[name]["rows"][key].get(end) for name in found for end in ("low", "high")},
        }
        for key, row in found["before"]["rows"].items()
        if key in found["after"]["rows"]
    }
    record = {
        "commits": dict(zip(("before", "after"), options.commits.split(","), strict=False)),
        "command": ["python", *command],
        "runs": {name: list(each["runs"].values()) for name, each in found.items()},
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: row["ratio"] for key, row in rows.items()}))


if __name__ == "__main__":
    main()
