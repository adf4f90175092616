"""Corpora over HTTP: a parquet file, sent or at the daemon, a folder of `datasets`, and what of them is learned."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.support.api_server import Api

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

ROWS = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"{n}"}]} for n in range(9)]


async def submit(api: Api, **fields: Any) -> tuple[int, Any]:
    return await api.call("POST", "/finetune", json={"adapter": "poet"} | fields)


async def test_a_parquet_file_is_read_at_the_daemon_and_from_an_upload(api: Api) -> None:
    assert api.config.data_root is not None
    file = api.config.data_root / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    status, at_daemon = await submit(api, path="rows.parquet")
    assert (status, at_daemon["rows"], at_daemon["training"]["train_on"]) == (202, 9, None)
    form = aiohttp.FormData()
    form.add_field("settings", '{"adapter": "sent", "training": {"train_on": "all"}}', content_type="application/json")
    form.add_field("file", file.read_bytes(), filename="corpus")
    status, sent = await api.call("POST", "/finetune", data=form)
    assert (status, sent["rows"], sent["tokens"]) == (202, 9, at_daemon["tokens"])
    assert sent["target_tokens"] == sent["tokens"] - sent["rows"] > at_daemon["target_tokens"]
    status, body = await submit(api, data=[{"text": "a b"}], training={"train_on": "assistant"})
    assert (status, body["error"]["line"]) == (422, 1)
    (api.config.data_root / "folder").mkdir()
    status, body = await submit(api, path="folder")
    assert (status, body["error"]["field"]) == (400, "path")
    assert "DatasetDict" not in body["error"]["message"]
    (api.config.data_root / "folder" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    status, body = await submit(api, path="folder")
    assert (status, body["error"]["message"]) == (
        400,
        "expected a file, or a folder of Dataset.save_to_disk (of a DatasetDict, one split's folder)",
    )


async def test_a_chat_becomes_a_row_for_each_answer(api: Api) -> None:
    """Whether the corpus is small or read by other processes."""
    assert api.config.data_root is not None
    chat = {"messages": ROWS[0]["messages"] + ROWS[1]["messages"]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([chat]), api.config.data_root / "rows.parquet")
    for source in ({"data": [chat]}, {"path": "rows.parquet"}):
        status, job = await submit(api, **source, training={"one_row_per_answer": True})
        assert (status, job["rows"], job["training"]["one_row_per_answer"]) == (202, 2, True)
    status, body = await submit(api, data=[chat], training={"one_row_per_answer": True, "train_on": "all"})
    assert (status, body["error"]["field"]) == (400, "training.one_row_per_answer")
