"""What the README shows is run: its shell commands and its Python against a real daemon."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
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
    assert len(shown) == 7
    said: dict[str, str] = {}
    for command in shown:
        words = shlex.split(command.replace("localhost:8000", daemon.url.removeprefix("http://")))
        words = [str(ROOT / word) if word.startswith("coserve/assets") else word for word in words]
        if "bench" in words:  # the same, in less time
            words += ["--duration", "4", "--finetune-rows", "48"]
        done = subprocess.run(
            words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout.strip(), command
        assert '"error"' not in done.stdout, (command, done.stdout)
        said[" ".join(words[:2])] = done.stdout
    finetuned = said["coserve finetune"]
    printed = blocks("text")[1].splitlines()
    assert finetuned.splitlines()[0] == printed[0]
    loss = re.search(r"loss (\d+\.\d+)", finetuned)
    assert loss is not None and float(loss[1]) < 1, finetuned
    assert said["coserve generate"].startswith(printed[1][:30]), said["coserve generate"]
    assert "pirate@1  succeeded" in said["coserve jobs"]
    assert sorted(path.name for path in (tmp_path / "pirate-peft").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert tomllib.loads(said["coserve config"])["policy"] == "slack"
    summary = json.loads((tmp_path / "bench-report" / "report.json").read_text())["summary"]
    assert summary["finetune_tokens"] > 1500 and summary["jobs_succeeded"] == summary["jobs"] > 0
    assert summary["completed"] == summary["requests"] > 0 and not summary["errors"]
    _, adapters = daemon.call("GET", "/adapters")
    assert [adapter["id"] for adapter in adapters["data"]] == ["pirate"], "bench left adapters behind"


def test_the_python_runs_as_printed(daemon: DaemonProcess) -> None:
    (code,) = blocks("python")
    code = code.replace("coserve.Client()", f"coserve.Client({daemon.url!r})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == " Ahoy!\n Fair winds!"
    assert "prints ` Ahoy!` and ` Fair winds!`" in README


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200
