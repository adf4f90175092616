"""The processes that compile for a worker of a warm-up."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.engine.warming.worker import pool_size

WORKER = """
import os, signal
from coserve.engine.warming.worker import start_compile_pool

pool = start_compile_pool(1)
print(pool.submit(os.getpid).result() != os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_they_end_with_a_worker_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"True\n"
        os.kill(worker.pid, signal.SIGKILL)
        # They have its standard output open: it ends with the last of them.
        assert select.select([worker.stdout], [], [], 60)[0] and worker.stdout.read() == b""


@given(st.integers(1, 12), st.integers(1, 256))
def test_every_worker_has_one_and_all_have_two_for_each_core_at_most(workers: int, cores: int) -> None:
    size = pool_size(workers, cores)
    assert size == 1 or size * workers <= 2 * cores
