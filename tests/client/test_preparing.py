"""A large corpus's way to its job is seen: by the SDK that sends it, and in the list of jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from coserve.client import AsyncClient, MockTransport, Request, Response, RetryPolicy
from coserve.core.errors import HelperLost, InvalidRequest, MalformedRow, Unreachable
from coserve.core.schemas import Preparing, SubmissionEvent
from coserve.data.corpus.sources import PIECES
from tests.support.api_server import serve_api
from tests.support.sdk import job

WIDE = PIECES.bytes // 10


def corpus(path: Path, rows: int, **last: str) -> Path:
    """Ten rows a piece: most of a line is blanks."""
    found = [{"text": f"row {number}"} for number in range(rows)]
    found += [last] if last else []
    path.write_bytes(b"".join(json.dumps(row).encode().ljust(WIDE - 1) + b"\n" for row in found))
    return path


async def test_the_sdk_and_the_list_of_jobs_show_how_far_a_corpus_is(tmp_path: Path) -> None:
    shown: list[Preparing] = []
    begun = asyncio.Event()

    def show(preparing: Preparing) -> None:
        shown.append(preparing)
        begun.set()

    async with (
        serve_api(tmp_path / "data", data_root=tmp_path, tokenizer_workers=1) as api,
        AsyncClient(f"http://127.0.0.1:{api.port}", retry=RetryPolicy(attempts=1)) as client,
    ):
        corpus(tmp_path / "rows.jsonl", 40)
        call = asyncio.create_task(client.finetune("poet", path="rows.jsonl", on_preparing=show))
        await begun.wait()
        page = await client.jobs()
        made = (await call).info
        assert (made.rows, made.state.value) == (40, "queued")
        assert {one.adapter for one in [*shown, *page.preparing]} == {"poet"}
        assert page.data == [] and len(page.preparing) == 1
        assert [one.rows for one in shown] == sorted({one.rows for one in shown} | {shown[0].rows})
        after = await client.jobs()
        assert after.preparing == [] and [one.id for one in after.data] == [made.id]
        corpus(tmp_path / "bad.jsonl", 25, txt="x")
        with pytest.raises(MalformedRow, match="line 26") as caught:
            await client.finetune("poet", path="bad.jsonl")
        assert caught.value.line == 26
        with pytest.raises(InvalidRequest):
            await client.finetune("poet", path="bad.jsonl", training={"batch_tokens": 0})
        assert (await client.jobs()).preparing == []
        status, answer = await api.call("POST", "/finetune", json={"adapter": "plain", "path": "rows.jsonl"})
        assert (status, answer["rows"]) == (202, 40)  # who does not ask for events gets one JSON object


EVENT = SubmissionEvent(preparing=Preparing("a", 0.0, 10, 0.5))


def events(*parts: bytes) -> Response:
    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return Response(202, {"Content-Type": "text/event-stream; charset=utf-8"}, body())


def data(event: SubmissionEvent) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    lost = b'event: error\ndata: {"error": {"code": "helper_lost", "message": "gone"}}\n\n'
    answers = [
        events(data(EVENT)),
        events(b": \n\n", data(EVENT), lost),
        events(data(EVENT), data(SubmissionEvent(job=job()))),
    ]
    sent: list[Request] = []

    def respond(request: Request) -> Response:
        sent.append(request)
        return answers[len(sent) - 1]

    shown: list[Preparing] = []
    patient = AsyncClient(transport=MockTransport(respond), retry=RetryPolicy(attempts=3, first=0.0, longest=0.0))
    handle = await patient.finetune("a", [{"text": "a b"}], on_preparing=shown.append)
    assert handle.id == job().id and len(shown) == 3
    assert len({request.headers["Idempotency-Key"] for request in sent}) == 1
    for error in (Unreachable, HelperLost):
        answers[:] = [events(data(EVENT))] if error is Unreachable else [events(lost)]
        sent.clear()
        with pytest.raises(error):
            await AsyncClient(transport=MockTransport(respond), retry=RetryPolicy(attempts=1)).finetune("a", [])
