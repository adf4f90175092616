"""Test rows of a job: measured by the trained adapter and by the base; refused where they are wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coserve.cli.app import run
from coserve.client import AsyncClient
from tests.support.api_server import Api
from tests.support.real_server import serve_real

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROW = {"prompt": "Today we", "completion": " sighted land."}
LEARN = {"data": [ROW], "training": {"steps": 3, "batch_tokens": 64, "learning_rate": 0.02}, "lora": {"r": 4}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    folder = tmp_path_factory.mktemp("test-rows")
    (folder / "root").mkdir()
    (folder / "root" / "test.csv").write_text('prompt,completion\nToday we," sighted land."\n')
    (folder / "root" / "other.csv").write_text("prompt,other\nToday we,sighted\n")
    async with serve_real(folder / "data", data_root=folder / "root") as api:
        yield api


async def test_a_job_records_what_coserve_eval_finds(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with AsyncClient(api.url) as client:
        handle = await client.finetune(
            "a", [ROW], lora={"r": 4}, training=LEARN["training"], test={"path": "test.csv", "max_tokens": 8}
        )
        job = await handle.wait()
    assert job.test is not None, job.notes
    assert job.test.adapter.rows == job.test.base.rows == 1
    assert job.test.adapter.loss < job.test.base.loss
    events = [event for _, event in await api.events(job.id)]
    assert [event["type"] for event in events][-2:] == ["test", "state"]
    assert events[-2]["test"] == (await api.call("GET", f"/finetune/{job.id}"))[1]["test"]
    assert not api.folder.job(job.id).exists()
    data, url = tmp_path / "rows.jsonl", api.url
    data.write_text(json.dumps(ROW))
    assert await asyncio.to_thread(run, ["eval", "a", str(data), "--max-tokens", "8", "--json", "--url", url]) == 0
    found = json.loads(capsys.readouterr().out)
    for name, mine in (("a", job.test.adapter), ("base", job.test.base)):
        assert found[name]["loss"] == pytest.approx(mine.loss, rel=1e-3)
        assert [found[name][field] for field in ("tokens", "token_accuracy", "match")] == [
            mine.tokens,
            mine.token_accuracy,
            mine.match,
        ]


async def test_the_command_uploads_rows_to_test_and_texts_have_no_match(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, test, url = tmp_path / "rows.jsonl", tmp_path / "test.jsonl", api.url
    rows.write_text(json.dumps(ROW))
    test.write_text(json.dumps({"text": "Today we sighted land."}) + "\n\n")
    command = ["finetune", "b", str(rows), "--steps", "1", "--test", str(test), "--set", "test.max_tokens=4"]
    assert await asyncio.to_thread(run, [*command, "--url", url]) == 0
    assert "of tokens right (base loss " in capsys.readouterr().out
    named = ["--columns", "prompt=question,completion=answer"]
    for path in (rows, test):
        path.write_text("question,answer,team\nToday we, sighted land.,crew\n")
    assert await asyncio.to_thread(run, [*command, *named, "--url", url]) == 0
    assert "% of answers right (base loss " in capsys.readouterr().out
    measure = ["eval", "b", str(test), "--max-tokens", "4", "--url", url]
    assert await asyncio.to_thread(run, [*measure, *named, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["b"]["rows"] == 1
    assert await asyncio.to_thread(run, measure) == 1
    assert "--columns prompt=question" in capsys.readouterr().err
    test.write_text("[1]")
    assert await asyncio.to_thread(run, [*command, "--url", url]) == 2
    assert "--test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("test", "field", "what"),
    [
        ({}, "test", "one of data and path"),
        ({"data": [ROW], "path": "test.csv"}, "test", "one of data and path"),
        ({"data": [ROW], "regex": "("}, "test.regex", "regular expression"),
        ({"data": [ROW], "regex": "a", "json_field": "b"}, "test.regex", "both"),
        ({"data": [{"prompt": "a", "chosen": "b", "rejected": "c"}]}, "test", "line 1: expected rows"),
        ({"data": [ROW, {"prompt": "x " * 2000, "completion": "y"}]}, "test", "row 2"),
        ({"path": "../secret"}, "test.path", ""),
        ({"path": "other.csv"}, "test", "line 2: "),
    ],
)
async def test_rows_that_cannot_be_measured_are_refused(
    api: Api, test: dict[str, Any], field: str | None, what: str
) -> None:
    status, body = await api.call("POST", "/finetune", json=LEARN | {"adapter": "c", "test": test})
    assert status in (400, 403, 422), body
    assert body["error"].get("field") == field and what in body["error"]["message"], body
    assert api.folder.job_ids() == []
