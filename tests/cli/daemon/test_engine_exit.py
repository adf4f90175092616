"""How the engine process ends while one of its threads is busy."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, logging, os, time
from concurrent.futures import ThreadPoolExecutor
from coserve.core.errors import EngineFault
from coserve.engine.worker import run_to_exit

async def work(error):
    asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), time.sleep, 3600)
    await asyncio.sleep(0.1)
    if error:
        raise error

logging.basicConfig()
for error in (None, EngineFault("broken")):
    if not (child := os.fork()):
        run_to_exit(work(error))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_it_ends_without_waiting_for_a_thread_that_compiles() -> None:
    """By itself, and by an error; in two processes that one has imported for."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["0", "1"], done.stderr
    assert "EngineFault: broken" in done.stderr
