"""CSV files and JSON arrays as corpora over HTTP, columns of other names, and the note about columns that are not
used."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from coserve.client import AsyncClient
from coserve.core.errors import InvalidRequest, MalformedRow
from tests.support.api_server import Api

ROWS = [{"id": n, "question": f"Who is {n}?", "answer": f" I,\n {n}."} for n in range(5)]
COLUMNS = {"prompt": "question", "completion": "answer"}
CSV = "id,question,answer\n" + "".join(f'{row["id"]},{row["question"]},"{row["answer"]}"\n' for row in ROWS)
NOTE = "columns that are not used: 'id'"


async def upload(api: Api, content: str, **settings: Any) -> tuple[int, Any]:
    form = aiohttp.FormData()
    form.add_field("settings", json.dumps({"adapter": "poet"} | settings), content_type="application/json")
    form.add_field("file", content.encode(), filename="corpus")
    return await api.call("POST", "/finetune", data=form)


@pytest.mark.parametrize(
    "content",
    [CSV, json.dumps(ROWS), json.dumps(ROWS, indent=2), "\n".join(map(json.dumps, ROWS))],
    ids=["csv", "array", "pretty", "jsonl"],
)
async def test_every_way_to_send_them_gives_the_same_job(api: Api, content: str) -> None:
    assert api.config.data_root is not None
    (api.config.data_root / "rows").write_text(content)
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
    async with AsyncClient(f"http://127.0.0.1:{api.port}") as client:
        job = await client.finetune("poet", file=CSV.encode(), columns={"prompt": "question", "completion": "answer"})
        assert (job.info.rows, job.info.notes[0]) == (5, NOTE)
        with pytest.raises(MalformedRow, match="'reply'"):
            await client.finetune("poet", file=CSV.encode(), columns={"prompt": "question", "completion": "reply"})
        with pytest.raises(InvalidRequest, match="columns: expected a mapping, got list"):
            await client.finetune("poet", ROWS, columns=["prompt"])  # type: ignore[arg-type]
