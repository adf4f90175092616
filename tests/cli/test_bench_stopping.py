"""SIGTERM ends a benchmark as Ctrl-C does: with nothing of it left on the daemon."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

from tests.support.real_server import serve_real

OPTIONS = "--duration 600 --rate 2 --adapters 2 --rank 4 --max-tokens 8 --finetune-rows 8 --steps 1000"


async def test_a_run_that_is_terminated_cleans_up(tmp_path: Path) -> None:
    async with serve_real(tmp_path / "data") as api:
        url = f"http://127.0.0.1:{api.port}"
        command = f"-m coserve.cli bench --url {url} --report {tmp_path / 'report'} {OPTIONS}".split()
        bench = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=DEVNULL, stderr=PIPE)
        while True:
            _, adapters = await api.call("GET", "/adapters")
            _, jobs = await api.call("GET", "/finetune")
            if len(adapters["data"]) == 2 and any(job["version"] > 1 for job in jobs["data"]):
                break
            await asyncio.sleep(0.05)
        bench.send_signal(signal.SIGTERM)
        _, said = await bench.communicate()
        assert (bench.returncode, said.decode().splitlines()[-1]) == (130, "deleting the adapters of this run")
        _, adapters = await api.call("GET", "/adapters")
        _, jobs = await api.call("GET", "/finetune")
        assert adapters["data"] == []
        assert {job["state"] for job in jobs["data"]} <= {"succeeded", "cancelled"}
