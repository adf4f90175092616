"""While an engine starts: what commands say, and what `coserve serve` prints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coserve.cli.app import run as run_command
from coserve.cli.status_lines import REPEAT, StatusLines
from coserve.client import RetryPolicy
from coserve.core.health import Warming
from coserve.core.link.engine import EngineWarming
from tests.support.api_server import Api, serve_api


@pytest.fixture
async def cold(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_api(tmp_path / "data", engine=False) as api:
        yield api


async def said(api: Api, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status of a command, and what it says on standard error."""
    command = [*arguments, "--url", api.url]
    status = await asyncio.to_thread(run_command, command, retry=RetryPolicy(attempts=1))
    return status, capsys.readouterr().err.strip()


async def test_a_command_that_needs_the_engine_says_that_it_starts(
    cold: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n')
    (tmp_path / "bridge.md").write_text("one two three")
    waits = "; --wait waits for it"
    commands = {
        ("generate", "hi"): waits,
        ("finetune", "a", str(tmp_path / "rows.jsonl")): waits,
        ("learn", "a", str(tmp_path / "bridge.md")): waits,
        ("memory",): "",
    }
    for command, advice in commands.items():
        assert await said(cold, capsys, *command) == (1, f"coserve: the daemon is starting{advice}")
    cold.service.engine.starting(EngineWarming(what="compiling kernels", done=12, total=310, seconds_left=41.7))
    for command, advice in commands.items():
        assert await said(cold, capsys, *command) == (
            1,
            f"coserve: the daemon is starting: compiling kernels 12/310, about 42 s left{advice}",
        )


@pytest.mark.parametrize("command", [["generate", "hi"], ["finetune", "a", "rows.jsonl", "--detach"]])
async def test_a_command_can_wait_for_a_daemon_that_starts(
    cold: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n')
    monkeypatch.chdir(tmp_path)
    cold.service.engine.starting(EngineWarming(what="compiling kernels", done=12, total=310, seconds_left=1.0))
    waiting = asyncio.create_task(said(cold, capsys, *command, "--wait"))
    asked = asyncio.Event()
    health = cold.service.health
    cold.service.health = lambda: (asked.set(), health())[1]  # type: ignore[func-returns-value, method-assign]
    await asked.wait()
    await cold.start_engine()
    status, text = await waiting
    assert (status, text.splitlines()[0]) == (0, "the daemon is starting: compiling kernels 12/310, about 1 s left")


async def test_lists_are_shown_meanwhile_with_a_word_of_it(cold: Api, capsys: pytest.CaptureFixture[str]) -> None:
    cold.service.engine.starting(EngineWarming(what="compiling kernels", done=12, total=310, seconds_left=None))
    for command in (["jobs", "list"], ["adapters", "list"]):
        assert await said(cold, capsys, *command) == (0, "the daemon is starting: compiling kernels 12/310")
    await cold.start_engine()
    for command in (["jobs", "list"], ["adapters", "list"]):
        assert await said(cold, capsys, *command) == (0, "")


async def test_a_restart_is_told_as_one(cold: Api, capsys: pytest.CaptureFixture[str]) -> None:
    await cold.start_engine()
    lost = asyncio.Event()
    with cold.service.engine.watched(lost.set):
        await cold.engine.die()
        await lost.wait()
    assert await said(cold, capsys, "generate", "hi") == (
        1,
        "coserve: the engine stopped and is being restarted; --wait waits for it",
    )
    cold.service.engine.starting(EngineWarming(what="compiling kernels", done=1, total=2, seconds_left=3.0))
    status, line = await said(cold, capsys, "generate", "hi")
    advice = "; --wait waits for it"
    assert (status, line) == (
        1,
        f"coserve: the engine stopped and is being restarted: compiling kernels 1/2, about 3 s left{advice}",
    )
    assert await said(cold, capsys, "jobs", "list") == (
        0,
        "the daemon is starting: compiling kernels 1/2, about 3 s left",
    )


def compiling(done: int, seconds_left: float | None = None) -> Warming:
    return Warming(done=done, total=9, seconds_left=seconds_left, what="compiling kernels")


def test_a_start_shows_now_and_then_how_far_it_is_and_ends_ready() -> None:
    said: list[str] = []
    now = 0.0
    lines = StatusLines("127.0.0.1", said.append, lambda: now)
    lines.show(8000, "starting", None)
    for done in range(3):
        lines.show(8000, "starting", compiling(done))
    now += REPEAT
    lines.show(8000, "starting", compiling(5, 41.7))
    for _ in range(2):
        lines.show(8000, "ready", None)
    assert said == [
        "starting: compiling kernels 0/9",
        "starting: compiling kernels 5/9, about 42 s left",
        "coserve listens on http://127.0.0.1:8000",
        "ready",
    ]


def test_a_restart_is_told_once_and_shows_its_own_progress() -> None:
    said: list[str] = []
    lines = StatusLines("::1", said.append, lambda: 0.0)
    for _ in range(2):
        lines.show(1, "starting", compiling(1, 3.0))
        lines.show(1, "ready", None)
        lines.show(1, "starting", None)
    ready = ["starting: compiling kernels 1/9, about 3 s left", "coserve listens on http://[::1]:1", "ready"]
    again = "starting again; requests get 503 until then"
    assert said == [*ready, again, *ready, again]
