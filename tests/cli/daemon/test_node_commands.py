"""`coserve backup`, `restore`, `ps` and `stop`, with a daemon that runs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.core.errors import ConfigError, StartupError
from coserve.state import backup as copies
from coserve.state.files import FileStore
from coserve.state.folder import DataFolder
from coserve.state.registry.registry import Registry
from coserve.state.running import RunningDaemon, announced, folder, running
from tests.support.crash_oracle import STEPS, job_request
from tests.support.daemon_process import DaemonProcess
from tests.support.examples import on_days


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def listening(session: int) -> set[int]:
    """TCP ports on which the processes of a session listen."""
    sockets = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.getsid(int(process.name)) == session:
                sockets |= {str(fd.readlink()) for fd in (process / "fd").iterdir()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    open_ones = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
    return {int(line[1].rpartition(":")[2], 16) for line in open_ones}


@on_days(2)
def test_a_copy_of_a_running_daemon_goes_on_elsewhere(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    data, copy, other = tmp_path / "data", tmp_path / "copy", tmp_path / "other"
    with DaemonProcess(model, data) as daemon:
        daemon.wait_ready()
        _, done = daemon.call("POST", "/finetune", job_request("org/done"))
        assert list(daemon.events("GET", f"/finetune/{done['id']}/events"))[-1]["state"] == "succeeded"
        _, going = daemon.call("POST", "/finetune", job_request("going") | {"training": {"steps": 3000}})
        (listed,) = (json.loads(line) for line in run("ps", "--json").splitlines())
        assert (listed["pid"], listed["url"]) == (daemon.process.pid, daemon.url)
        assert listening(daemon.process.pid) == {int(daemon.url.rpartition(":")[2])}
        made = json.loads(run("backup", str(copy), "--data-dir", str(data), "--json"))
        assert (made["adapters"], made["jobs"]) == (1, 1)
        refused = CliRunner().invoke(app, ["backup", str(copy), "--data-dir", str(data)])
        assert isinstance(refused.exception, ConfigError) and "not empty" in str(refused.exception)
        assert run("stop") == f"stopped {daemon.process.pid}\n"
        assert daemon.wait() == 0 and run("ps").split() == ["PID", "URL", "MODEL", "DATA", "AGE"]
    run("restore", str(copy), "--data-dir", str(other))
    with DaemonProcess(model, other) as daemon:
        daemon.wait_ready()
        _, found = daemon.call("GET", "/finetune")
        assert {job["id"] for job in found["data"]} == {done["id"], going["id"]}
        assert daemon.call("POST", f"/finetune/{going['id']}/cancel")[0] == 200
        body = {"prompt": "The", "adapter": "org/done", "max_tokens": 2}
        assert daemon.call("POST", "/generate", body)[0] == 200
        assert daemon.call("GET", f"/finetune/{done['id']}")[1]["step"] == STEPS
        os.kill(daemon.process.pid, signal.SIGKILL)
        daemon.wait()
        assert running() == [] and not list(folder().iterdir())  # the killed one's file is removed


def test_a_copy_is_complete_or_refused(tmp_path: Path) -> None:
    source = DataFolder(tmp_path / "50%20 of data? #1")
    with source.lock():
        with closing(Registry(source.database)) as registry:
            registry.note("kept")
        store = FileStore(source.files)
        kept, gone = (store.add(_file(tmp_path / name), name, "fine-tune") for name in ("kept", "gone"))
        state = source.session_state("s-1.train.0", "kept")
        state.mkdir(parents=True)
        _file(state / "state.json")
        batch = source.batches / "batch_1"
        batch.mkdir(parents=True)
        _file(batch / "record.json")
        made = copies.back_up(source.root, tmp_path / "copy", clock=lambda: 100.0)
        assert (made.files, made.created_at) == (2, 100.0)
    other = DataFolder(tmp_path / "other")
    copies.restore(tmp_path / "copy", other.root)
    with closing(Registry(other.database)) as registry:
        assert registry.notes() == ["kept"]
    restored = FileStore(other.files)
    restored.load()
    assert restored.content(kept.id).read_text() == "kept" and restored.get(gone.id) == gone
    assert (other.session_state("s-1.train.0", "kept") / "state.json").is_file()
    assert (other.batches / "batch_1" / "record.json").is_file()
    for empty, full in ((tmp_path / "nothing", tmp_path / "new"), (tmp_path / "copy", other.root)):
        with pytest.raises(ConfigError):
            copies.restore(empty, full)
    with pytest.raises(ConfigError):
        copies.back_up(tmp_path / "nothing", tmp_path / "new")
    (tmp_path / "copy" / copies.MARK).unlink()  # as if the copy had been interrupted
    with pytest.raises(ConfigError):
        copies.restore(tmp_path / "copy", tmp_path / "new")


def _file(path: Path) -> Path:
    path.write_text(path.name)
    return path


def test_a_folder_of_another_user_lists_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = RunningDaemon(pid=os.getpid(), url="http://x", model="m", data_dir="d", started_at=1.0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with announced(daemon):
        assert running() == [daemon]
    assert running() == []
    (tmp_path / "coserve").rmdir()
    (tmp_path / "coserve").symlink_to(tmp_path)
    with announced(daemon):
        assert running() == []


def test_a_daemon_that_begins_is_not_taken_for_a_dead_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = RunningDaemon(pid=os.getpid(), url="http://x", model="m", data_dir="d", started_at=1.0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    lock = fcntl.flock

    def lock_after_a_look(file: IO[bytes], kind: int) -> None:
        if kind == fcntl.LOCK_EX:
            assert running() == []
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", lock_after_a_look)
    with announced(daemon):
        assert running() == [daemon]


def test_stop_says_which_daemons_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = RunningDaemon(pid=os.getpid(), url="http://x:8000", model="m", data_dir="d", started_at=1.0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def refusal(*arguments: str) -> str:
        error = CliRunner().invoke(app, ["stop", *arguments]).exception
        assert isinstance(error, StartupError)
        return str(error)

    assert refusal() == "no daemon of this user runs on this machine"
    with announced(daemon):
        assert refusal("8000") == "expected the process id of a daemon that coserve ps lists, got 8000"
    monkeypatch.setattr("coserve.cli.node.running.running", lambda: [daemon, daemon])
    assert refusal() == "expected a process id, as 2 daemons run; coserve ps lists them"
