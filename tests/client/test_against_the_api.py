"""The SDK and the API together, on a real socket, over a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from coserve.client import AsyncClient, RetryPolicy
from coserve.core.errors import (
    AdapterNotFound,
    EngineUnavailable,
    InvalidRequest,
    JobNotFound,
    MalformedRow,
    QueueFull,
    Unauthorized,
    Unreachable,
    WrongJobState,
)
from coserve.core.link.generation import CancelRequest, Generate
from coserve.core.link.jobs import StartJob
from coserve.core.training.jobs import JobState
from tests.support.api_server import REPLY, Api, serve_api
from tests.support.fake_engine import make_base, write_peft

FAST = RetryPolicy(first=0.01, longest=0.05)
ONCE = RetryPolicy(attempts=1)
ROWS = [{"prompt": "Hello", "completion": " Ahoy!"}]


@asynccontextmanager
async def daemon(path: Path, retry: RetryPolicy = ONCE, **settings: object) -> AsyncIterator[tuple[Api, AsyncClient]]:
    async with (
        serve_api(path / "data", max_queue=4, max_jobs=3, **settings) as api,
        AsyncClient(
            f"http://127.0.0.1:{api.port}", api_key=api.config.api_key, retry=retry, read_timeout=120
        ) as client,
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
        with pytest.raises(AdapterNotFound):
            await client.generate("hello", adapter="nobody")
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("hello", temperature=-1)
        assert caught.value.field == "temperature"


async def test_the_environment_says_where_the_daemon_is_and_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "key-of-the-environment"
    async with daemon(tmp_path, api_key=key) as (api, _):
        monkeypatch.setenv("COSERVE_URL", f"http://127.0.0.1:{api.port}")
        monkeypatch.setenv("COSERVE_API_KEY", key)
        async with AsyncClient() as client:
            assert (await client.jobs()).data == []
        async with AsyncClient(api_key="another-key-of-some-length") as client:
            with pytest.raises(Unauthorized):
                await client.jobs()
        async with AsyncClient("http://127.0.0.1:1", retry=ONCE) as client:
            with pytest.raises(Unreachable):
                await client.jobs()


async def test_who_stops_reading_stops_the_daemon(tmp_path: Path) -> None:
    async with daemon(tmp_path) as (api, client):
        api.engine.stall_after = 2
        async with aclosing(client.stream("hello")) as stream:
            await anext(stream)
        async with asyncio.timeout(120):
            await api.engine.saw(CancelRequest)


async def test_a_job_from_rows_to_its_adapter(tmp_path: Path) -> None:
    async with daemon(tmp_path) as (_, client):
        job = await client.finetune("pirate", ROWS, lora={"r": 2}, training={"steps": 3}, metadata={"who": "me"})
        assert job.info.state is JobState.QUEUED or job.info.state is JobState.RUNNING
        done = await job.wait(progress=False, timeout=120)
        assert (done.state, done.result, done.metadata) == (JobState.SUCCEEDED, "pirate@1", {"who": "me"})
        alike = await client.finetune("alike", ROWS, lora=done.lora, training={"steps": 1})
        assert (await alike.wait(progress=False, timeout=120)).lora == done.lora
        events = [event async for event in job.events()]
        assert [event.seq for event in events] == sorted({event.seq for event in events})
        assert [event.metrics.step for event in events if event.metrics] == [1, 2, 3]
        assert {found.id for found in (await client.jobs()).data} == {job.id, alike.id}
        assert (await (await client.job(job.id)).refresh()).state is JobState.SUCCEEDED
        assert (await client.generate("hello", adapter="pirate@1")).version == 1
        with pytest.raises(WrongJobState):
            await job.cancel()
        with pytest.raises(JobNotFound):
            await client.job("job-0000000000000000")


async def test_a_corpus_as_a_file(tmp_path: Path) -> None:
    corpus = tmp_path / "rows.jsonl"
    corpus.write_text('{"text": "one"}\n{"text": "two"}\n')
    async with daemon(tmp_path) as (_, client):
        first = await client.finetune("a", file=corpus, training={"steps": 1}, idempotency_key="k")
        again = await client.finetune("a", file=corpus, training={"steps": 1}, idempotency_key="k")
        assert first.id == again.id and first.info.rows == 2
        with pytest.raises(MalformedRow, match="line 2") as caught:
            await client.finetune("a", file=b'{"text": "x"}\nnot json\n', training={"steps": 1})
        assert caught.value.line == 2


async def test_pause_resume_and_cancel(tmp_path: Path) -> None:
    async with daemon(tmp_path) as (api, client):
        api.engine.go_jobs.clear()
        job = await client.finetune("a", ROWS, training={"steps": 3})
        await api.engine.saw(StartJob)
        assert (await job.pause()).state is JobState.PAUSED
        assert (await job.resume()).state in (JobState.QUEUED, JobState.RUNNING)
        assert (await job.cancel()).state is JobState.CANCELLED
        assert (await job.wait(progress=False, timeout=120)).state is JobState.CANCELLED


async def test_adapters_go_in_and_out(tmp_path: Path) -> None:
    async with daemon(tmp_path) as (api, client):
        write_peft(tmp_path / "peft", make_base(api.base.vocab))
        made = await client.import_adapter("zero", tmp_path / "peft")
        assert (made.ref, made.source) == ("zero@1", "import")
        assert [found.ref for found in (await client.adapters()).data] == ["zero@1"]
        assert (await client.adapter("zero@1")).versions == [1]
        folder = await client.download_adapter("zero", tmp_path / "out")
        assert (await client.import_adapter("zero", folder)).ref == "zero@2", "what came out goes in"
        assert (await client.delete_adapter("zero")).versions == [1, 2]
        with pytest.raises(AdapterNotFound):
            await client.adapter("zero")


async def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    async with daemon(tmp_path) as (api, client):
        api.engine.go_requests.clear()
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(client.generate("hello")) for _ in range(4)]
            await api.engine.saw(Generate, 4)
            with pytest.raises(QueueFull) as caught:
                await client.generate("hello")
            assert caught.value.retry_after >= 1
            api.engine.go_requests.set()
        assert all(task.result().choices[0].text == REPLY for task in waiting)


async def test_a_daemon_whose_engine_died_and_came_back(tmp_path: Path) -> None:
    async with daemon(tmp_path) as (api, client):
        await api.engine.die()
        with pytest.raises(EngineUnavailable):
            await client.generate("hello")
        assert (await client.health()).status == "starting"
        waiting = asyncio.create_task(client.wait_ready())
        await api.start_engine()
        assert (await waiting).status == "ready"
        assert (await client.generate("hello")).choices[0].text == REPLY
        assert (await client.health()).status == "ready"
