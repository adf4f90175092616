"""A daemon that stops does not wait for uploads and corpora: their requests end with a 503, and nothing of them
stays."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from tests.support.api_server import Api, form, read_events

ROWS = (json.dumps({"text": "the cat sat on the mat " * 20}) + "\n").encode() * 1000
"""More than what is tokenised in the daemon's own process."""
STOPPING = "the daemon is stopping"


def upload() -> aiohttp.FormData:
    return form({"adapter": "poet", "training": {"steps": 1}}, ("rows.jsonl", ROWS))


async def until_prepared(api: Api) -> None:
    """Until the corpus is listed as one that is being tokenised: its helper process starts."""
    async with asyncio.timeout(60):
        while not (await api.call("GET", "/finetune"))[1]["preparing"]:
            pass


async def nothing_stays(api: Api) -> bool:
    async with asyncio.timeout(60):
        while list(api.folder.staging.iterdir()):  # an upload's folder goes after the end of its events
            await api.call("GET", "/health")
    return api.folder.job_ids() == []


async def test_a_corpus_that_is_being_tokenised_is_given_up(api: Api) -> None:
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(api.call("POST", "/finetune", data=upload()))
        await until_prepared(api)
        api.service.stop()
    status, body = answer.result()
    assert (status, body["error"]["code"]) == (503, "engine_unavailable") and STOPPING in body["error"]["message"]
    assert await nothing_stays(api)
    status, body = await api.call("POST", "/finetune", data=upload())  # on a connection that was kept
    assert status == 503 and STOPPING in body["error"]["message"]


async def test_events_of_a_submission_end_with_an_error(api: Api) -> None:
    async def events() -> str:
        headers = {"Accept": "text/event-stream"}
        async with api.http.post("/finetune", data=upload(), headers=headers) as response:
            return await response.text()

    async with asyncio.TaskGroup() as tasks:
        told = tasks.create_task(events())
        await until_prepared(api)
        api.service.stop()
    last = read_events(told.result())[-1]
    assert last["event"] == "error" and STOPPING in last["data"]["error"]["message"]
    assert await nothing_stays(api)


async def test_health_tells_that_the_daemon_stops(api: Api) -> None:
    api.service.stop()
    for path, expected in (("/health", 200), ("/health/ready", 503)):
        status, body = await api.call("GET", path)
        assert (status, body["status"]) == (expected, "stopping")


@pytest.mark.parametrize(
    ("kind", "begun"),
    [
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n{"text"'),
        ("application/json", b'{"adapter": "poet", "data": [{"text"'),
    ],
)
async def test_a_body_that_arrives_is_given_up(api: Api, kind: str, begun: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(
        f"POST /finetune HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: "
        "1000000\r\n\r\n".encode()
        + begun
    )
    await writer.drain()
    await api.works()
    api.service.stop()
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readuntil(b"}}")
    assert head.startswith(b"HTTP/1.1 503") and STOPPING.encode() in body
    writer.close()
    await writer.wait_closed()
    assert await nothing_stays(api)
