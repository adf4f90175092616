"""What the README shows is run: its shell commands and its Python against a real daemon."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MAKE = {"make demo", "make test", "make serve MODEL=path-or-hub-name"}
"""Run by CI (`make test`), or too long for a test; that they are targets of the Makefile is checked."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    text = "".join(blocks("console")).replace("\\\n", " ")
    return [line[2:] for line in text.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(Path("bundled"), tmp_path_factory.mktemp("readme") / "data") as process:
        process.wait_ready()
        yield process


def test_the_make_commands_are_targets() -> None:
    assert {command for command in commands() if command.startswith("make ")} == MAKE
    makefile = (ROOT / "Makefile").read_text()
    for command in MAKE:
        assert f"\n{command.split()[1]}:" in makefile


def test_the_shell_commands_run_as_printed(daemon: DaemonProcess, tmp_path: Path) -> None:
    environ = os.environ | {
        "COSERVE_URL": daemon.url,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    shown = [command for command in commands() if command not in MAKE]
    assert len(shown) == 6
    for command in shown:
        words = shlex.split(command.replace("localhost:8000", daemon.url.removeprefix("http://")))
        words = [str(ROOT / word) if word.startswith("coserve/assets") else word for word in words]
        if "bench" in words:  # the same, in less time
            words += ["--duration", "2", "--finetune-rows", "2"]
        done = subprocess.run(
            words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout.strip(), command
        assert '"error"' not in done.stdout, (command, done.stdout)


def test_the_python_runs_as_printed(daemon: DaemonProcess) -> None:
    (code,) = blocks("python")
    code = code.replace("coserve.Client()", f"coserve.Client({daemon.url!r})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200
