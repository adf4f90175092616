"""The SDK and the API together, on a real socket, over a fake engine; how far a large corpus is on its way to a job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from coserve.client import AsyncClient, MockTransport, Request, Response, RetryPolicy
from coserve.core import errors
from coserve.core.schemas.jobs import Preparing, SubmissionEvent
from coserve.core.training.jobs import JobState
from coserve.data.corpus.sources import PIECES
from tests.support.api_server import REPLY, Api, serve_api
from tests.support.fake_engine import make_base, write_peft
from tests.support.sdk import job

ONCE = RetryPolicy(attempts=1)
ROWS = [{"prompt": "Hello", "completion": " Ahoy!"}]


@asynccontextmanager
async def daemon(path: Path, retry: RetryPolicy = ONCE, **settings: object) -> AsyncIterator[tuple[Api, AsyncClient]]:
    async with (
        serve_api(path / "data", max_queue=4, max_jobs=3, **settings) as api,
        AsyncClient(api.url, api_key=api.config.api_key, retry=retry, read_timeout=120) as client,
    ):
        yield api, client


async def test_generate_and_stream(tmp_path: Path) -> None:
    async with daemon(tmp_path) as (_, client):
        answer = await client.generate("hello", n=2, seed=5, max_tokens=50, logprobs=1)
        assert [choice.text for choice in answer.choices] == [REPLY, REPLY]
        chat = await client.generate(messages=[{"role": "user", "content": "hello"}])
        assert chat.choices[0].text == REPLY
        pieces = [piece async for piece in client.stream([1, 2, 3])]
        assert "".join(piece.text for piece in pieces) == REPLY
        assert pieces[-1].usage is not None
        with pytest.raises(errors.AdapterNotFound):
            await client.generate("hello", adapter="nobody")
        with pytest.raises(errors.InvalidRequest) as caught:
            await client.generate("hello", temperature=-1)
        assert caught.value.field == "temperature"


async def test_the_environment_says_where_the_daemon_is_and_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "key-of-the-environment"
    async with daemon(tmp_path, api_key=key) as (api, _):
        monkeypatch.setenv("COSERVE_URL", api.url)
        monkeypatch.setenv("COSERVE_API_KEY", key)
        async with AsyncClient() as client:
            assert (await client.jobs()).data == []
        async with AsyncClient(api_key="another-key-of-some-length") as client:
            with pytest.raises(errors.Unauthorized):
                await client.jobs()
        async with AsyncClient("http://127.0.0.1:1", retry=ONCE) as client:
            with pytest.raises(errors.Unreachable):
                await client.jobs()


async def test_a_job_from_rows_to_its_adapter(tmp_path: Path) -> None:
    async with daemon(tmp_path) as (_, client):
        job = await client.finetune("pirate", ROWS, lora={"r": 2}, training={"steps": 3}, metadata={"who": "me"})
        assert job.info.state is JobState.QUEUED or job.info.state is JobState.RUNNING
        done = await job.wait(progress=False, timeout=120)
        assert (done.state, done.result, done.metadata) == (JobState.SUCCEEDED, "pirate@1", {"who": "me"})
        alike = await client.finetune("org/alike", ROWS, lora=done.lora, training={"steps": 1})
        assert (again := await alike.wait(progress=False, timeout=120)).lora == done.lora
        assert again.result == "org/alike@1"
        events = [event async for event in job.events()]
        assert [event.seq for event in events] == sorted({event.seq for event in events})
        assert [event.metrics.step for event in events if event.metrics] == [1, 2, 3]
        assert {found.id for found in (await client.jobs()).data} == {job.id, alike.id}
        assert (await (await client.job(job.id)).refresh()).state is JobState.SUCCEEDED
        assert (await client.generate("hello", adapter="pirate@1")).version == 1
        with pytest.raises(errors.WrongJobState):
            await job.cancel()
        with pytest.raises(errors.JobNotFound):
            await client.job("job-0000000000000000")


async def test_adapters_go_in_and_out(tmp_path: Path) -> None:
    async with daemon(tmp_path) as (api, client):
        write_peft(tmp_path / "peft", make_base(api.base.vocab))
        made = await client.import_adapter("org/zero", tmp_path / "peft")
        assert (made.ref, made.source) == ("org/zero@1", "import")
        assert [found.ref for found in (await client.adapters()).data] == ["org/zero@1"]
        assert (await client.adapter("org/zero@1")).versions == [1]
        folder = await client.download_adapter("org/zero", tmp_path / "out")
        assert (await client.import_adapter("org/zero", folder)).ref == "org/zero@2", "what came out goes in"
        assert (await client.delete_adapter("org/zero")).versions == [1, 2]
        with pytest.raises(errors.AdapterNotFound):
            await client.adapter("org/zero")


async def test_a_daemon_whose_engine_died_and_came_back(tmp_path: Path) -> None:
    async with daemon(tmp_path) as (api, client):
        await api.engine.die()
        with pytest.raises(errors.EngineUnavailable):
            await client.generate("hello")
        assert (await client.health()).status == "starting"
        waiting = asyncio.create_task(client.wait_ready())
        await api.start_engine()
        assert (await waiting).status == "ready"
        assert (await client.generate("hello")).choices[0].text == REPLY
        assert (await client.health()).status == "ready"


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
        AsyncClient(api.url, retry=RetryPolicy(attempts=1)) as client,
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
        with pytest.raises(errors.MalformedRow, match="line 26") as caught:
            await client.finetune("poet", path="bad.jsonl")
        assert caught.value.line == 26
        with pytest.raises(errors.InvalidRequest):
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
    for error in (errors.Unreachable, errors.HelperLost):
        answers[:] = [events(data(EVENT))] if error is errors.Unreachable else [events(lost)]
        sent.clear()
        with pytest.raises(error):
            await AsyncClient(transport=MockTransport(respond), retry=RetryPolicy(attempts=1)).finetune("a", [])
