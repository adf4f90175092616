"""Every command, whatever it is given and whoever answers: no traceback, one line, a status that is not 0."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from coserve.cli.app import run as run_command
from coserve.cli.common import retry_policy
from coserve.cli.failures import explain, run_safely
from coserve.client import RetryPolicy
from coserve.core.errors import EngineUnavailable, InvalidRequest, QueueFull
from tests.support.hostile_server import ANSWERS, hostile_server

NOBODY = "http://127.0.0.1:1"
ASKING = [
    *(["generate", "hi"], ["finetune", "a", "ROWS"], ["jobs", "list"], ["jobs", "show", "x"], ["jobs", "watch", "x"]),
    *(["jobs", "pause", "x"], ["jobs", "resume", "x"], ["jobs", "cancel", "x"], ["adapters", "list"]),
    *(["adapters", "show", "x"], ["adapters", "import", "x", "PEFT"], ["adapters", "download", "x", "NEW"]),
    *(["adapters", "delete", "x"], ["bench", "--duration", "1", "--report", "NEW"]),
]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def paths(folder: Path) -> dict[str, str]:
    (folder / "rows.jsonl").write_text('{"text": "one two three"}\n')
    (folder / "peft").mkdir(exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "peft" / name).write_text("{}")
    return {"ROWS": str(folder / "rows.jsonl"), "PEFT": str(folder / "peft"), "NEW": str(folder / "new")}


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failing command says."""
    assert run_command(args, retry=RetryPolicy(attempts=1)) in (1, 2)
    said = capsys.readouterr().err
    assert "Traceback" not in said and "unexpected" not in said, said
    assert said.startswith("coserve: ") and said.count("\n") == 1, said
    return said


def pairs(others: Collection[str]) -> list[tuple[list[str], str]]:
    """The first command with each of `others`, each other command with one of them."""
    names = list(others)
    return [(ASKING[0], name) for name in names] + [
        (command, names[number % len(names)]) for number, command in enumerate(ASKING[1:], 1)
    ]


@pytest.mark.parametrize(("command", "answer"), pairs(ANSWERS))
def test_no_daemon_answers_as_it_should(
    command: list[str], answer: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    places = paths(tmp_path)
    with hostile_server(ANSWERS[answer]) as url:
        said = run([*(places.get(word, word) for word in command), "--url", url], capsys)
    if answer == "wrong key":
        assert "--key" in said
    assert not (tmp_path / "new").exists() or not any((tmp_path / "new").iterdir())


ADDRESSES = {
    NOBODY: "no daemon answers at 127.0.0.1:1: Connection refused; check that it runs and that the URL is right (coserve",  # noqa: E501
    "localhost:8000": "got 'localhost:8000'; did you mean 'http://localhost:8000'?",
    "http://localhost:8000/v1": "expected the daemon's own URL, 'http://localhost:8000', got 'http://localhost:8000/v1'",
    "http://": "expected a URL",
    "": "URL",
    "http://no-such-host.invalid": "no daemon answers at no-such-host.invalid:80: ",
}


@pytest.mark.parametrize(("command", "url"), pairs(ADDRESSES))
def test_wrong_addresses(command: list[str], url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    places = paths(tmp_path)
    assert ADDRESSES[url] in run([*(places.get(word, word) for word in command), "--url", url], capsys)


@pytest.mark.parametrize("key", ["with\nnewline", "schlüssel", " x"])
def test_keys_that_no_header_can_hold(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "api_key" in run(["jobs", "list", "--url", NOBODY, "--key", key], capsys)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["adapters", "import", "x", "/nonexistent"], "/nonexistent"),
        (["adapters", "import", "x", "EMPTY"], "adapter_config.json"),
        (["bench", "--trace", "FILE"], "line 1"),
        (["bench", "--trace", "EMPTY"], "trace"),
        (["bench", "--trace", "/nonexistent"], "trace"),
        (["bench", "--trace", "BINARY"], "line 1"),
        (["bench", "--rate", "-1"], "rate"),
        (["bench", "--adapters", "-1"], "adapters"),
        (["bench", "--report", "FILE"], "report"),
        (["bench", "--report", "FILE/below"], "report"),
        (["bench", "--report", "/proc/report"], "report"),
        (["bench", "--save", "/proc/trace"], "/proc"),
        (["demo", "--report", "FILE/below"], "report"),
        (["config", "--config", "/nonexistent"], "/nonexistent"),
        (["config", "--config", "BINARY"], "config"),
        (["config", "--config", "EMPTY"], "config"),
        (["config", "--config", "FILE"], "config"),
        (["generate", "\udcff"], "UTF-8"),
    ],
)
def test_files_that_are_not_what_they_should_be(
    command: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not what you expect")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").mkdir()
    for word, path in (("FILE", "file"), ("BINARY", "binary"), ("EMPTY", "empty")):
        command = [part.replace(word, str(tmp_path / path)) for part in command]
    command += ["--url", NOBODY] if command[0] not in ("config", "demo") else []
    assert says in run(command, capsys)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["nope"], "no such command 'nope' (see coserve --help)"),
        (["jobs", "nope"], "no such command 'nope' (see coserve jobs --help)"),
        (["finetune", "a", "/nonexistent"], "'/nonexistent' does not exist (see coserve finetune --help)"),
        (["generate"], "(see coserve generate --help)"),
        (["jobs", "list", "--x"], "no such option: --x (see coserve jobs list --help)"),
        (["finetune", "a", __file__, "--lr", "1"], "no such option: --lr; did you mean '--learning-rate'? (see"),
        (["finetune", "a", __file__, "--warmup-steps", "1"], "--warmup-steps; did you mean '--set training.warmup_ste"),
        (["finetune", "a", __file__, "--warmup-ratio", "1"], "; did you mean '--set training.warmup_ratio=VALUE'?"),
        (["finetune", "a", __file__, "--data", "x"], "no such option: --data; give the rows as the argument FILE (see"),
        (["finetune", "a", __file__, "--eval-dataset", "x"], "; give their file with --validation-file (see"),
        (["finetune", "a", __file__, "--set", "training.epochs=x"], "epochs: expected a number or auto, got 'x' (see"),
        (["generate", "x", "--adaptor", "a"], "no such option: --adaptor; did you mean '--adapter'? (see"),
        (["generate", "x", "--logit-bias", "1"], "--logit-bias; did you mean 'logit_bias' of POST /generate?"),
        (["jobs", "list", "--limit", "many"], "invalid value for '--limit': expected a whole number, got 'many' (see"),
        (["jobs", "list", "--limit", "0"], "invalid value for '--limit': expected at least 1, got 0 (see"),
        (["generate", "x", "--temperature", "warm"], "'--temperature': expected a number, got 'warm' (see"),
        (["finetune", "a", __file__, "--train-on", "al"], "'--train-on': 'al' is not one of 'completion', "),
        (
            ["adapters", "download", "x", "NEW", "--decoder", "nonsense.x"],
            "decoder: expected one of model, model.language_model, language_model.model, model.language_model.model, ",
        ),
        (["adapters", "download", "x", "NEW", "--decoder", ""], ", got '' (see coserve adapters download --help)"),
    ],
)
def test_wrong_arguments_end_in_one_line(command: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in run(command, capsys)
    assert run_command(command) == 2


def test_a_group_without_a_command_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["jobs"]):
        assert run_command(command) == 2
        shown = capsys.readouterr()
        assert shown.out.startswith("Usage: coserve") and "\nCommands:\n" in shown.out and not shown.err


def test_an_error_that_nobody_foresaw_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError("gone")

    assert run_safely(fail) == 1
    assert capsys.readouterr().err == "coserve: unexpected KeyError: 'gone'; COSERVE_DEBUG=1 shows where\n"
    monkeypatch.setenv("COSERVE_DEBUG", "1")
    run_safely(fail)
    assert "in fail" in capsys.readouterr().err


def test_errors_that_came_in_a_group_and_in_lines() -> None:
    async def fail() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(refuse())

    async def refuse() -> None:
        raise QueueFull("too\nmany")

    assert run_safely(lambda: asyncio.run(fail())) == 1
    assert explain(InvalidRequest("expected more", field="rank")) == "invalid_request: rank: expected more"


def test_an_error_that_ctrl_c_caused_is_ctrl_c() -> None:
    def wrapped() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("stopped in the middle of something") from error

    def grouped() -> None:
        raise BaseExceptionGroup("two tasks", [ValueError("one"), KeyboardInterrupt()])

    assert run_safely(wrapped) == run_safely(grouped) == 130


def process(*args: str, **environ: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "coserve", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "", **environ},
    )


def test_a_reader_that_leaves_and_a_terminal_without_unicode() -> None:
    with process("config") as left:
        assert left.stdout is not None and left.stderr is not None
        left.stdout.close()
        assert left.stderr.read() == b""
    environ = {"PYTHONIOENCODING": "ascii", "COSERVE_MODEL": "modèle", "PYTHONUTF8": "0"}
    with process("config", **environ) as shown:
        out, err = shown.communicate()
    assert (shown.returncode, err) == (0, b"")
    assert b"mod?le" in out


def test_ctrl_c_while_a_daemon_is_silent() -> None:
    """A server that accepts and says nothing."""
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with process("generate", "hi", "--url", url) as waiting:
            connection, _ = silent.accept()
            connection.recv(1)
            os.kill(waiting.pid, signal.SIGINT)
            _, err = waiting.communicate()
            connection.close()
    assert waiting.returncode == 130, err
    assert b"Traceback" not in err and b"Exception" not in err


def test_a_wait_for_a_quota_or_a_queue_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    tell = retry_policy().on_wait
    assert tell is not None
    for error in (EngineUnavailable("it starts"), QueueFull("acme has 2 jobs already"), QueueFull("the queue is full")):
        tell(error, 9.5)
    assert capsys.readouterr().err == "acme has 2 jobs already; trying again in 10 s\n"
