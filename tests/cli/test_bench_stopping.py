"""A benchmark ends with nothing of it left on the daemon: at SIGTERM, as at Ctrl-C, and where it may open few files."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import msgspec
import pytest

from tests.support.examples import in_turns
from tests.support.real_server import serve_real

OPTIONS = "--duration 600 --rate 2 --adapters 2 --rank 4 --max-tokens 8 --finetune-rows 8 --steps 1000"


@pytest.mark.parametrize("ending", in_turns([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
async def test_a_run_that_is_ended_cleans_up_and_reports_what_it_has(tmp_path: Path, ending: signal.Signals) -> None:
    async with serve_real(tmp_path / "data") as api:
        url = f"http://127.0.0.1:{api.port}"
        command = f"-m coserve bench --url {url} --report {tmp_path / 'report'} {OPTIONS}".split()
        bench = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=DEVNULL, stderr=PIPE)
        while True:
            _, adapters = await api.call("GET", "/adapters")
            _, jobs = await api.call("GET", "/finetune")
            answered = "coserve_requests_total{" in await (await api.http.get("/metrics")).text()
            if len(adapters["data"]) == 2 and answered and any(job["version"] > 1 for job in jobs["data"]):
                break
            await asyncio.sleep(0.05)
        bench.send_signal(ending)
        _, said = await bench.communicate()
        *_, cleaned, told = said.decode().splitlines()
        assert bench.returncode == 130, said.decode()
        assert cleaned == "deleting the adapters of this run"
        assert told == "interrupted; the report is of what was answered until then"
        report = msgspec.json.decode((tmp_path / "report" / "report.json").read_bytes())
        assert report["summary"]["completed"] > 0 and report["run"]["interrupted"]
        _, adapters = await api.call("GET", "/adapters")
        _, jobs = await api.call("GET", "/finetune")
        assert adapters["data"] == []
        assert {job["state"] for job in jobs["data"]} <= {"succeeded", "cancelled"}


@pytest.mark.slow
async def test_a_run_that_may_open_few_files_says_so_and_cleans_up(tmp_path: Path) -> None:
    """The connections of its requests leave room for those of its clean-up."""
    options = "--route completions --duration 0.5 --rate 400 --adapters 2 --rank 2 --max-tokens 8 --finetune off"
    async with serve_real(tmp_path / "data") as api:
        url = f"http://127.0.0.1:{api.port}"
        command = f"-m coserve bench --url {url} --report {tmp_path / 'report'} {options}".split()
        bench = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdout=DEVNULL,
            stderr=PIPE,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        )
        _, said = await bench.communicate()
        assert "this process may open 64 files (ulimit -Hn)" in said.decode()
        assert "could not be deleted" not in said.decode()
        _, adapters = await api.call("GET", "/adapters")
        assert adapters["data"] == []
