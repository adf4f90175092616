"""What a benchmark leaves that SIGTERM ends, as `timeout` sends it: its rows, and no process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = """
import asyncio, os
from benchmarks.common.gpus import run_on_gpus
from benchmarks.common.options import make_parser
from benchmarks.common.results import Results
from benchmarks.peers.processes import running

parser = make_parser("tried")
parser.add_argument("--gpus", type=int, default=1)
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

async def measure():
    async with running(["sleep", "600"], options.out / "log", {}) as process:
        results = Results(options.out, "tried.json", script="here", hardware="x", seed=0, revision="abc", settings={})
        results.put(os.environ["CUDA_VISIBLE_DEVICES"], 1.0, "s", about={"pid": process.pid})
        await process.wait()

if options.gpus == 1:
    asyncio.run(measure())
else:
    run_on_gpus("tried", [[] for _ in range(options.gpus)], options.out, "tried.json")
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_servers_end_and_rows_stay(gpus: int, tmp_path: Path) -> None:
    (tmp_path / "tried.py").write_text(BENCHMARK)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, "-m", "tried", "--gpus", str(gpus), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = [process.stdout.readline() for _ in range(gpus)]
        process.terminate()
        assert process.wait(60) != 0, printed
    rows = json.loads((tmp_path / "out" / "tried.json").read_text())["rows"]
    assert sorted(rows) == [str(number) for number in range(gpus)]
    for row in rows.values():
        with pytest.raises(ProcessLookupError):
            os.kill(row["pid"], 0)
