"""Corpora of every format over HTTP: CSV, JSON arrays, parquet, folders of `datasets`; columns of other names; rows for
validation; and what of them is learned."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from coserve.cli.app import run
from coserve.client import AsyncClient
from coserve.core.errors import EmptyCorpus, InvalidRequest, MalformedRow, NoTargets
from coserve.core.schemas.jobs import Job
from tests.support.api_server import Api, form

ROWS = [{"id": n, "question": f"Who is {n}?", "answer": f" I,\n {n}."} for n in range(5)]
COLUMNS = {"prompt": "question", "completion": "answer"}
CSV = "id,question,answer\n" + "".join(f'{row["id"]},{row["question"]},"{row["answer"]}"\n' for row in ROWS)
NOTE = "columns that are not used: 'id'"


async def upload(api: Api, content: str, **settings: Any) -> tuple[int, Any]:
    sent = form({"adapter": "poet"} | settings, ("corpus", content.encode()))
    return await api.call("POST", "/finetune", data=sent)


@pytest.mark.parametrize(
    "content",
    [CSV, json.dumps(ROWS), json.dumps(ROWS, indent=2), "\n".join(map(json.dumps, ROWS))],
    ids=["csv", "array", "pretty", "jsonl"],
)
async def test_every_way_to_send_them_gives_the_same_job(api: Api, content: str) -> None:
    (api.root / "rows").write_text(content)
    _, plain = await api.call(
        "POST", "/finetune", json={"adapter": "poet", "data": [{f: row[c] for f, c in COLUMNS.items()} for row in ROWS]}
    )
    _, inline = await api.call("POST", "/finetune", json={"adapter": "poet", "data": ROWS, "columns": COLUMNS})
    _, sent = await upload(api, content, columns=COLUMNS)
    _, at_daemon = await api.call("POST", "/finetune", json={"adapter": "poet", "path": "rows", "columns": COLUMNS})
    for job in (inline, sent, at_daemon):
        assert (job["rows"], job["tokens"], job["target_tokens"]) == (5, plain["tokens"], plain["target_tokens"])
        assert job["notes"][0] == NOTE and NOTE not in plain["notes"]
    messages = [event["message"] for _, event in await api.events(sent["id"])]
    assert NOTE in messages
    assert not any(api.folder.staging.iterdir()), "what was converted stays behind"


async def test_what_is_wrong_is_refused_with_its_line(api: Api) -> None:
    status, body = await upload(api, CSV.replace(" I,\n 3", '" 3'), columns=COLUMNS)
    assert (status, body["error"]["code"], body["error"]["line"]) == (422, "malformed_row", 8)
    status, body = await upload(api, CSV)
    assert (status, body["error"]["line"]) == (422, 1)
    assert "--columns prompt=question" in body["error"]["message"]
    for columns in ({"prompts": "question"}, {"prompt": ""}, {"prompt": "x" * 257}, {"prompt": 1}):
        status, body = await upload(api, CSV, columns=columns)
        assert (status, body["error"]["code"]) == (400, "invalid_request"), columns
        assert body["error"]["field"].startswith("columns"), body
    assert not any(api.folder.staging.iterdir())


async def test_the_sdk_names_columns(api: Api) -> None:
    async with AsyncClient(api.url) as client:
        job = await client.finetune("poet", file=CSV.encode(), columns={"prompt": "question", "completion": "answer"})
        assert (job.info.rows, job.info.notes[0]) == (5, NOTE)
        with pytest.raises(MalformedRow, match="'reply'"):
            await client.finetune("poet", file=CSV.encode(), columns={"prompt": "question", "completion": "reply"})
        with pytest.raises(InvalidRequest, match="columns: expected a mapping, got list"):
            await client.finetune("poet", ROWS, columns=["prompt"])  # type: ignore[arg-type]


def table(path: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    """A file of the rows."""
    if kind == "csv":
        cells = [",".join(f'"{value}"' for value in row.values()) for row in rows]
        path.write_text("\n".join([",".join(rows[0]), *cells]))
    elif kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if kind == "array" else "\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(("kind", "held"), [("csv", "jsonl"), ("jsonl", "csv"), ("parquet", "array")])
async def test_a_validation_file_of_any_format_is_held_back(api: Api, tmp_path: Path, kind: str, held: str) -> None:
    rows, validation = table(tmp_path / "rows", kind, ROWS), table(tmp_path / "held", held, ROWS[:2])
    command = ["finetune", "poet", str(rows), "--validation-file", str(validation), "--detach", "--json"]
    command += ["--columns", "prompt=question,completion=answer", "--url", api.url]
    assert await asyncio.to_thread(run, command) == 0
    (job,) = (await api.call("GET", "/finetune"))[1]["data"]
    assert (job["rows"], job["training"]["validation_rows"]) == (7, 2)


async def test_rows_for_validation_of_the_sdk(api: Api, tmp_path: Path) -> None:
    (tmp_path / "held").write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]))
    lines = b"\n".join(json.dumps(row).encode() for row in ROWS)
    async with AsyncClient(api.url) as client:

        async def job(validation: Any, **given: Any) -> Job:
            return (await client.finetune("poet", validation=validation, columns=COLUMNS, **given)).info

        for given in (
            {"data": ROWS, "validation": ROWS[:2]},
            {"data": ROWS, "validation": tmp_path / "held"},
            {"file": lines, "validation": ROWS[:2], "training": {"steps": 1}},
            {"file": CSV.encode(), "validation": table(tmp_path / "rows.csv", "csv", ROWS[:2])},
        ):
            made = await job(**given)
            assert (made.rows, made.training.validation_rows) == (7, 2)
        with pytest.raises(MalformedRow, match=r"^validation: line 2: "):
            await job([ROWS[0], {"question": "a"}], data=ROWS)
        with pytest.raises(NoTargets, match=r"^validation: line 4: "):  # after a header and a record of two lines
            await job(table(tmp_path / "bad.csv", "csv", [ROWS[0], {**ROWS[0], "answer": ""}]), file=CSV.encode())
        with pytest.raises(MalformedRow, match=r"^line 1: "):
            await job(ROWS, data=[{"question": "a"}])
        for validation, more, field in (
            (ROWS, {"path": "rows"}, "validation"),
            (ROWS, {"data": ROWS, "training": {"validation_rows": 1}}, "validation"),
            (ROWS, {"data": ROWS, "training": {"validation_split": 0.5}}, "validation"),
            ([], {"data": ROWS}, "validation"),
            ({"text": "a"}, {"data": ROWS}, "validation"),
            (tmp_path / "none", {"data": ROWS}, "validation"),
        ):
            with pytest.raises((InvalidRequest, EmptyCorpus)) as caught:
                await job(validation, **more)
            assert caught.value.field == field, caught.value


JOB = {"adapter": "poet", "data": ROWS, "columns": COLUMNS}


async def test_rows_for_validation_are_a_field_of_the_request(api: Api) -> None:
    held = table(api.root / "held", "csv", ROWS[:2])
    for validation in ({"data": ROWS[:2]}, {"path": "held"}):
        status, job = await api.call("POST", "/finetune", json=JOB | {"validation": validation})
        assert (status, job["rows"], job["training"]["validation_rows"]) == (202, 7, 2), job
    held.unlink()
    for validation, more, status, field in (
        ({}, {}, 400, "validation"),
        ({"data": ROWS, "path": "held"}, {}, 400, "validation"),
        ({"path": "held"}, {}, 400, "validation"),
        ({"path": "../held"}, {}, 403, "validation"),
        ({"data": []}, {}, 422, "validation"),
        ({"data": [ROWS[0], {"question": "a"}]}, {}, 422, "validation"),
        ({"data": ROWS}, {"training": {"validation_split": 0.5}}, 400, "validation"),
        ({"data": 1001 * ROWS[:1]}, {}, 400, "validation.data"),
    ):
        found, body = await api.call("POST", "/finetune", json=JOB | {"validation": validation} | more)
        assert (found, body["error"]["field"]) == (status, field), body
    body = {"adapter": "b", "document": "text", "validation": {"data": ROWS}}
    assert (await api.call("POST", "/finetune", json=body))[1]["error"]["field"] == "validation"
    assert not any(api.folder.staging.iterdir()), "what was sent stays behind"


async def test_other_rows_for_validation_are_another_request(api: Api) -> None:
    async def send(rows: bytes) -> tuple[int, Any]:
        sent = form({"adapter": "poet", "columns": COLUMNS}, ("corpus", CSV.encode()))
        sent.add_field("validation", rows, filename="any")
        return await api.call("POST", "/finetune", data=sent, headers={"Idempotency-Key": "k"})

    lines = [json.dumps(row).encode() for row in ROWS]
    (_, first), (_, again) = [await send(lines[0]) for _ in range(2)]
    assert first["id"] == again["id"]
    status, body = await send(lines[1])
    assert (status, body["error"]["code"]) == (422, "idempotency_mismatch")
    assert "another validation" in body["error"]["message"]


CHATS = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"{n}"}]} for n in range(9)]


async def submit(api: Api, **fields: Any) -> tuple[int, Any]:
    return await api.call("POST", "/finetune", json={"adapter": "poet"} | fields)


async def test_a_parquet_file_is_read_at_the_daemon_and_from_an_upload(api: Api) -> None:
    file = table(api.root / "rows.parquet", "parquet", CHATS)
    status, at_daemon = await submit(api, path="rows.parquet")
    assert (status, at_daemon["rows"], at_daemon["training"]["train_on"]) == (202, 9, None)
    upload = form({"adapter": "sent", "training": {"train_on": "all"}}, file)
    status, sent = await api.call("POST", "/finetune", data=upload)
    assert (status, sent["rows"], sent["tokens"]) == (202, 9, at_daemon["tokens"])
    assert sent["target_tokens"] == sent["tokens"] - sent["rows"] > at_daemon["target_tokens"]
    status, body = await submit(api, data=[{"text": "a b"}], training={"train_on": "assistant"})
    assert (status, body["error"]["line"]) == (422, 1)
    (api.root / "folder").mkdir()
    status, body = await submit(api, path="folder")
    assert (status, body["error"]["field"]) == (400, "path")
    assert "DatasetDict" not in body["error"]["message"]
    (api.root / "folder" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    status, body = await submit(api, path="folder")
    assert (status, body["error"]["message"]) == (
        400,
        "expected a file, or a folder of Dataset.save_to_disk (of a DatasetDict, one split's folder)",
    )


async def test_a_chat_becomes_a_row_for_each_answer(api: Api) -> None:
    """Whether the corpus is small or read by other processes."""
    chat = {"messages": CHATS[0]["messages"] + CHATS[1]["messages"]}
    table(api.root / "rows.parquet", "parquet", [chat])
    for source in ({"data": [chat]}, {"path": "rows.parquet"}):
        status, job = await submit(api, **source, training={"one_row_per_answer": True})
        assert (status, job["rows"], job["training"]["one_row_per_answer"]) == (202, 2, True)
    status, body = await submit(api, data=[chat], training={"one_row_per_answer": True, "train_on": "all"})
    assert (status, body["error"]["field"]) == (400, "training.one_row_per_answer")
