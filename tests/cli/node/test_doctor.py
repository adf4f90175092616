"""`coserve doctor` says what is wrong with a machine, and what to do."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.cli.node import doctor
from coserve.config import Config
from coserve.state.folder import DataFolder
from coserve.state.running import RunningDaemon, announced

H100 = "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06\n"


def answers(monkeypatch: pytest.MonkeyPatch, *, driver: str, torch: str) -> None:
    def run(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(stdout=driver if command[0] == "nvidia-smi" else torch)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize(
    ("driver", "torch", "settings", "level", "text"),
    [
        (H100, '["13.0", true, 1]', Config(), "ok", "580.65.06; torch for CUDA 13.0"),
        (H100, '["13.0", true, 1]', Config(tp=2), "error", "--tp 2"),
        (H100, "[null, false, 0]", Config(), "warning", "without CUDA"),
        (H100, '["13.0", false, 0]', Config(device="cuda"), "error", "cannot use NVIDIA H100"),
        ("", "[null, false, 0]", Config(), "ok", "CPU"),
        ("", "[null, false, 0]", Config(device="cuda"), "error", "no NVIDIA driver"),
        ("", "Traceback", Config(), "error", "cannot be imported"),
    ],
)
def test_what_keeps_torch_from_a_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, driver: str, torch: str, settings: Config, level: str, text: str
) -> None:
    answers(monkeypatch, driver=driver, torch=torch)
    found = doctor.check_gpu(settings)
    assert found.level == level
    assert text in found.what
    assert bool(found.do) == (level != "ok")


def test_a_taken_port_and_a_file_for_a_folder_end_it_with_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers(monkeypatch, driver="", torch="[null, false, 0]")
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ["--port", str(taken.getsockname()[1]), "--data-dir", str(tmp_path / "file" / "data")]
        result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 1
    assert result.output.count("error:") == 2
    assert result.output.count("->") >= 2


def test_what_serve_would_refuse_is_said_of_a_daemon_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers(monkeypatch, driver="", torch="[null, false, 0]")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    data = tmp_path / "data"
    with DataFolder(data).lock(), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = RunningDaemon(os.getpid(), f"http://127.0.0.1:{port}", "bundled", str(data), 1.0)
        with announced(daemon):
            result = CliRunner().invoke(app, ["doctor", "--port", str(port), "--data-dir", str(data)])
    assert result.exit_code == 1
    assert f"error:   data_dir: {data} belongs to a daemon that is running" in result.output
    assert f"port {port} on 127.0.0.1 is taken by coserve, pid {os.getpid()} (coserve ps)" in result.output


def test_a_sound_machine_has_status_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers(monkeypatch, driver="", torch="[null, false, 0]")
    result = CliRunner().invoke(app, ["doctor", "--port", "0", "--data-dir", str(tmp_path / "new" / "data")])
    assert result.exit_code == 0, result.output
    assert "error:" not in result.output
