"""What a real daemon leaves for other users of the machine to read: nothing."""

from __future__ import annotations

import stat
from pathlib import Path

from tests.support.crash_oracle import job_request
from tests.support.daemon_process import DaemonProcess

KEY = "0123456789abcdef"


def descendants(pid: int) -> list[int]:
    """Every process below `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def test_files_are_for_their_owner_and_child_processes_do_not_know_the_key(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    auth = {"Authorization": f"Bearer {KEY}"}
    with DaemonProcess(model, data, environ={"COSERVE_API_KEY": KEY}) as daemon:
        daemon.wait_ready()
        assert daemon.call("GET", "/adapters")[0] == 401
        status, job = daemon.call("POST", "/finetune", job_request("adapter"), auth)
        assert status == 202, job
        status, answer = daemon.call("POST", "/tokenize", {"prompt": "the cat sat " * 10_000}, auth)
        assert status == 200, answer
        children = descendants(daemon.process.pid)
        assert len(children) >= 2  # the engine, and the process that tokenised
        for pid in children:
            assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
            assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert daemon.stop() == 0
    files = [data, *data.rglob("*")]
    assert len(files) > 5
    open_to_others = [path for path in files if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    assert not open_to_others
