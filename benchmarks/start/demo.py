"""The numbers of `make demo` in the README: `python -m benchmarks.start.demo [--figure PNG]`.

Runs the demo in a process of its own and saves its summary with hardware and versions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.common.provenance import cpu_name

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "demo.json"
PACKAGES = ("torch", "transformers", "aiohttp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path, help="save the demo's plot here")
    figure = parser.parse_args().figure
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "coserve.cli", "demo", "--report", folder]
        subprocess.run(command, check=True)
        summary = json.loads((Path(folder) / "report.json").read_text())["summary"]
        if figure is not None:
            shutil.copy(Path(folder) / "report.png", figure)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    result = {
        "hardware": cpu_name(),
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES},
        "commit": commit.stdout.strip(),
        "command": "python -m benchmarks.start.demo",
        "date": datetime.now(UTC).date().isoformat(),
        "seed": "requests 0 to 74, jobs 0",
        "runs": 1,
        "summary": summary,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
