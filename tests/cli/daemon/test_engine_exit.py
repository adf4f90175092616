"""How the engine process ends while one of its threads is busy."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, logging, time
from concurrent.futures import ThreadPoolExecutor
from coserve.core.errors import EngineFault
from coserve.engine.worker import run_to_exit

async def work():
    asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), time.sleep, 3600)
    await asyncio.sleep(0.1)
    {end}

logging.basicConfig()
run_to_exit(work())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("raise EngineFault('broken')", 1, "EngineFault: broken"), pytest.param("", 0, "", marks=pytest.mark.slow)],
)
def test_it_ends_without_waiting_for_a_thread_that_compiles(end: str, status: int, said: str) -> None:
    script = SCRIPT.format(end=end)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
