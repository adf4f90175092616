"""`coserve memory` shows what /health says."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from coserve.cli.app import app
from coserve.cli.node import memory
from coserve.core.gpu_memory import MemoryUse
from tests.support.gpu_memory import USE


def shown(monkeypatch: pytest.MonkeyPatch, use: MemoryUse | None, *options: str) -> tuple[int, str]:
    client = SimpleNamespace(health=lambda: SimpleNamespace(memory=use, status="ready"), close=lambda: None)
    monkeypatch.setattr(memory, "connect", lambda *_: client)
    result = CliRunner().invoke(app, ["memory", *options])
    return result.exit_code, result.output


def test_every_use_and_every_job_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = shown(monkeypatch, USE)
    assert status == 0
    for text in ("base and buffers", "of them adapters", "other processes", "in all", "job-7", "512", "12 of 32"):
        assert text in output
    assert "for jobs: 140 of 500 MiB needed" in output


def test_layers_that_are_recomputed_but_for_attention_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = USE.each
    use = msgspec.structs.replace(USE, each=(msgspec.structs.replace(job, partly_recomputed_layers=8),))
    assert "12+8 of 32" in shown(monkeypatch, use)[1]


def test_pinned_memory_is_shown_where_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pinned" not in shown(monkeypatch, USE)[1]
    use = msgspec.structs.replace(USE, pinned=30 << 20, pinned_limit=400 << 20)
    assert "host memory, pinned: 30 of 400 MiB for the state of jobs" in shown(monkeypatch, use)[1]


def test_json_is_what_health_has(monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = shown(monkeypatch, USE, "--json")
    assert status == 0
    assert json.loads(output)["each"][0]["optimizer"] == USE.each[0].optimizer


def test_without_a_plan_there_is_nothing_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    status, _ = shown(monkeypatch, None)
    assert status != 0
