"""`coserve keys`, `quotas` and `log-level`, against the API."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.cli.app import run as run_command
from coserve.client import RetryPolicy
from coserve.core.link.engine import SetLogLevel
from tests.support.api_server import serve_api
from tests.support.hostile_server import hostile_server, http


async def run(*arguments: str) -> tuple[int, str]:
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    return result.exit_code, result.output + (str(result.exception) if result.exit_code == 1 else "")


async def test_keys_quotas_and_the_log_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = logging.getLogger().level
    async with serve_api(tmp_path / "data") as api:
        monkeypatch.setenv("COSERVE_URL", api.url)
        status, first = await run("keys", "create", "--scope", "admin", "--name", "root")
        assert status == 0
        status, said = await run("keys", "list")
        assert status == 1 and "Authorization" in said
        monkeypatch.setenv("COSERVE_API_KEY", first.strip())
        scopes = ("--scope", "train", "--scope", "generate")
        status, made = await run("keys", "create", *scopes, "--project", "acme", "--expires", "90d", "--json")
        id = json.loads(made)["key"]["id"]
        for wrong in ("soon", "0d"):
            assert (await run("keys", "create", "--scope", "train", "--expires", wrong))[0] != 0
        status, listed = await run("keys", "list")
        lines = [line.split() for line in listed.splitlines()]
        assert lines[0][:2] == ["ID", "PROJECT"] and lines[1][1:4] == ["default", "admin", "valid"]
        assert lines[2][:3] == [id, "acme", "generate,train"] and "valid for 89d" in listed
        assert await run("keys", "revoke", id) == (0, f"revoked {id} of project acme\n")
        assert "revoked" in (await run("keys", "list"))[1]
        status, said = await run("quotas", "set", "acme", "--jobs", "2", "--bytes", "1000")
        assert [line.split() for line in said.splitlines()][1] == ["acme", "-", "-", "2", "1000"]
        status, said = await run("quotas", "list")
        assert said.splitlines()[1].split() == ["acme", "-", "-", "0", "of", "2", "0", "of", "1000"]
        assert json.loads((await run("quotas", "list", "--json"))[1])["acme"] == {
            "jobs": 2,
            "bytes": 1000,
            "used": {"jobs": 0, "bytes": 0},
        }
        status, said = await run("quotas", "set", "acme", "--json")
        assert json.loads(said) == {"acme": {}}
        assert len((await run("quotas", "list"))[1].splitlines()) == 1
        try:
            assert await run("log-level", "error") == (0, "error\n")
            assert logging.getLogger().level == logging.ERROR
            assert await api.engine.saw(SetLogLevel) == [SetLogLevel(level="error")]
        finally:
            logging.getLogger().setLevel(level)


def test_a_wait_for_the_quota_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = b'{"error": {"code": "quota_exceeded", "message": "too many"}}'
    answer = http("429 Too Many Requests", refusal, kind="application/json", head="Retry-After: 0\r\n")
    with hostile_server(answer) as url:
        assert run_command(["keys", "list", "--url", url], retry=RetryPolicy(attempts=2, first=0.001)) == 1
    told = capsys.readouterr().err
    assert told == "too many; trying again in 1 s\ncoserve: quota_exceeded: too many\n"
