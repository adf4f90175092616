"""A child whose parent was killed before the child could ask for its end: it ends, and does nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coserve.core.processes import is_stopped
from tests.support.daemon_process import DaemonProcess

MODULE = "tests.cli.daemon.test_orphans"
STARTS = {
    "start_child": f"asyncio.run(start_child({MODULE!r}, theirs))",
    "spawn_child": f"spawn_child({MODULE!r}, theirs)",
}
SCRIPT = """
import asyncio, socket, sys, time
from coserve.core.processes import spawn_child, start_child
ours, theirs = socket.socketpair()
{start}
time.sleep(600)
"""
OBEYED = "obeyed"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")


def eventually(find: Callable[[], int | None]) -> int:
    for _ in range(60_000):
        if (found := find()) is not None:
            return found
        time.sleep(0.001)
    raise AssertionError("never found")


def child_of(pid: int, module: str) -> int | None:
    """The child of `pid` that runs `module`."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if module in Path(f"/proc/{child}/cmdline").read_text():
                return child
    return None


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("killed", [True, False])
def test_a_child_whose_parent_was_killed_at_its_start_does_nothing(start: str, killed: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(start=STARTS[start])], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = eventually(lambda: child_of(parent.pid, "test_orphans"))
        eventually(lambda: child if is_stopped(child) else None)
        if killed:
            parent.kill()
            parent.wait()
        os.kill(child, signal.SIGCONT)
        first = parent.stdout.readline().strip()  # the last process that has the pipe has ended, or the child speaks
        parent.kill()
        assert first == ("" if killed else OBEYED)
        assert parent.stdout.read() == ""


@pytest.mark.slow
def test_an_engine_whose_api_process_was_killed_while_it_started_loads_nothing(model: Path, tmp_path: Path) -> None:
    with DaemonProcess(model, tmp_path / "data", options=["--log-format", "json"]) as daemon:
        engine = eventually(lambda: child_of(daemon.process.pid, "coserve.engine.process"))
        os.kill(engine, signal.SIGSTOP)
        daemon.logged("engine starts")  # it has its settings
        daemon.process.kill()
        daemon.process.wait()
        os.kill(engine, signal.SIGCONT)
        assert daemon.wait() == -signal.SIGKILL
        assert {"base loaded", "engine stops while it starts"}.isdisjoint(
            entry["message"] for entry in daemon.entries()
        )


if __name__ == "__main__":
    from coserve.core.processes import obey_parent

    os.kill(os.getpid(), signal.SIGSTOP)
    obey_parent()
    print(OBEYED, flush=True)
    time.sleep(600)
