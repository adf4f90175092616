"""How many processor cores a process may use, and how child processes are killed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from coserve.core.processes import signal_child, usable_cores, usable_memory


@pytest.mark.parametrize(("written", "most"), [("100000 100000\n", 1), ("50000 100000\n", 1), ("max 100000\n", 10**6)])
def test_a_containers_quota_is_obeyed(tmp_path: Path, written: str, most: int) -> None:
    (tmp_path / "cpu.max").write_text(written)
    assert usable_cores(tmp_path / "cpu.max") == min(most, usable_cores(tmp_path / "missing"))


@pytest.mark.parametrize(("written", "most"), [("4096\n", 4096), (f"{1 << 60}\n", 1 << 60), ("max\n", 1 << 60)])
def test_a_containers_memory_is_all_there_is(tmp_path: Path, written: str, most: int) -> None:
    (tmp_path / "memory.max").write_text(written)
    assert usable_memory(tmp_path / "memory.max") == min(most, usable_memory(tmp_path / "missing"))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_so_is_the_cpu_affinity(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores(tmp_path / "missing") == 1
    finally:
        os.sched_setaffinity(0, before)


async def test_a_child_that_is_killed_while_it_dies_keeps_its_exit_status(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        process = await asyncio.create_subprocess_exec("sleep", "100")
        for _ in range(5000):  # some while it runs, some while asyncio has not waited for it yet, some later
            signal_child(process, signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL
        signal_child(process, signal.SIGKILL)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
