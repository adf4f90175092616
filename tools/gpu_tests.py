"""Run the tests that need a GPU and save the outcome.

    python tools/gpu_tests.py OUT.json [--commit REVISION] [pytest arguments]

`--commit`: the tested commit, where there is no repository to ask.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", default="")
    given, arguments = parser.parse_known_args()
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", *arguments]
    log = given.out.with_suffix(".log")
    with log.open("w") as output:  # a file, so that a run that is cut off can be read
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    said = log.read_text()
    print("\n".join(line for line in said.splitlines() if "FAILED" in line or "ERROR" in line), said[-6000:])
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    record = {
        "summary": said.strip().splitlines()[-1].strip("= "),
        "hardware": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "triton", "transformers", "stanford-stk")},
        },
        "commit": given.commit or revision.stdout.strip(),
        "command": " ".join(["python", *command[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
