"""What the README shows is run: its shell commands and its Python against a real daemon."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import coserve
from coserve.client import JobHandle
from tests.support.daemon_process import DaemonProcess
from tests.support.examples import on_days

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MAKE = {"make demo", "make serve", "make serve MODEL=path-or-hub-name PORT=8001 DATA=another-folder"}
"""Too long for a test, or with values of nobody's; that they are targets of the Makefile is checked."""


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


def checkout(folder: Path) -> None:
    """What the commands need of a checkout: its environment, as `make` leaves it, and the bundled corpora."""
    (folder / "coserve").symlink_to(ROOT / "coserve")
    (folder / ".venv" / "bin").mkdir(parents=True)
    installed = Path(sys.executable).parent
    (folder / ".venv" / "bin" / "activate").write_text(f'PATH="{installed}:$PATH"\n')


def test_the_make_commands_are_targets() -> None:
    assert {command for command in commands() if command.startswith("make ")} == MAKE
    makefile = (ROOT / "Makefile").read_text()
    for command in MAKE:
        assert f"\n{command.split()[1]}:" in makefile


@on_days(4)
@pytest.mark.timeout(1800)
def test_the_shell_commands_run_as_printed(daemon: DaemonProcess, tmp_path: Path) -> None:
    """In one shell, whose path has no `coserve` until the first line; only port and duration are others."""
    first, *shown = [command for command in commands() if command not in MAKE]
    assert first == ". .venv/bin/activate" and len(shown) == 9
    checkout(tmp_path)
    script = [first]
    for number, command in enumerate(shown):
        here = command.replace("localhost:8000", daemon.url.removeprefix("http://"))
        if " bench " in command:  # the same, in less time
            here += " --duration 4 --finetune-rows 48"
        script.append(f"{here} > said.{number} || exit")
    environ = {name: value for name, value in os.environ.items() if name != "PATH"}
    environ |= {"COSERVE_URL": daemon.url, "PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = {}
    for number, command in enumerate(shown):
        output = (tmp_path / f"said.{number}").read_text()
        assert output.strip(), command
        assert '"error":{' not in output, (command, output)
        said[" ".join(shlex.split(command)[:2])] = output
    finetuned = said["coserve finetune"]
    printed = blocks("text")[1].splitlines()
    assert finetuned.splitlines()[0] == printed[0]
    loss = re.search(r"loss (\d+\.\d+)", finetuned)
    assert loss is not None and float(loss[1]) < 1, finetuned
    assert said["coserve generate"].startswith(printed[1][:30]) and printed[1].endswith(" ..."), said[
        "coserve generate"
    ]
    assert {"pirate@1 succeeded", "greeter@1 succeeded"} <= {
        " ".join(line.split()[1:3]) for line in said["coserve jobs"].splitlines()
    }
    assert sorted(path.name for path in (tmp_path / "pirate-peft").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    summary = json.loads((tmp_path / "bench-report" / "report.json").read_text())["summary"]
    assert summary["finetune_tokens"] > 1500 and summary["jobs_succeeded"] == summary["jobs"] > 0
    assert summary["completed"] == summary["requests"] > 0 and not summary["errors"]
    _, adapters = daemon.call("GET", "/adapters")
    assert [adapter["id"] for adapter in adapters["data"]] == ["captain", "greeter", "pirate"], "bench left others"


@pytest.mark.slow
def test_the_python_runs_as_printed(daemon: DaemonProcess) -> None:
    """The second block asks for the adapter that the first one makes."""
    pytest.importorskip("openai")
    for code, printed in zip(blocks("python"), (" Ahoy!\n Fair winds!", " Ahoy!\n"), strict=True):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code.replace("http://localhost:8000", daemon.url)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=os.environ | {"COSERVE_URL": daemon.url},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == printed
    assert "prints ` Ahoy!` and ` Fair winds!`" in README and "prints ` Ahoy!` too" in README


def test_the_python_calls_what_there_is() -> None:
    tree = ast.parse(blocks("python")[0])
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    owners = {"coserve": coserve, "client": coserve.Client, "job": JobHandle}
    assert {"coserve", "client", "job"} <= {name for name, _ in used}
    for name, attribute in used:
        assert name not in owners or hasattr(owners[name], attribute), f"{name}.{attribute}"


def test_every_page_of_the_docs_is_linked() -> None:
    linked = {link.partition("#")[0] for link in re.findall(r"\]\((docs/[^)\s]+)\)", README)}
    assert {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")} <= linked


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert max(map(len, cells)) <= 240, "two lines of a cell"
