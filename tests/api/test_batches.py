"""Batches by the real `openai` client over a fake engine: answered, refused, cancelled, resumed after a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coserve.api.access.quotas import Quotas
from coserve.api.openai.batches.runner import Answer, BatchRunner
from coserve.api.openai.batches.store import OUTPUT, BatchRecord, BatchStore
from coserve.core.access.schemas import Quota
from coserve.core.errors import QueueFull, QuotaExceeded
from coserve.core.link.generation import Generate
from coserve.state.files import FileStore
from tests.support.api_server import REPLY, serve_api, with_template
from tests.support.chat_templates import QWEN3
from tests.support.small_disk import fill, small_disk

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types import Batch

openai = pytest.importorskip("openai")

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 50}


def line(id: str, body: dict[str, Any], url: str = "/v1/chat/completions") -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


async def begin(client: AsyncOpenAI, lines: list[Any], endpoint: str = "/v1/chat/completions") -> Batch:
    content = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()
    file = await client.files.create(file=("batch.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window="24h",
        metadata={"a": "b"},  # type: ignore[arg-type]
    )


async def ended(client: AsyncOpenAI, id: str, *states: str) -> Batch:
    states = states or ("completed", "failed", "cancelled")
    while (batch := await client.batches.retrieve(id)).status not in states:  # noqa: ASYNC110 - as clients do
        await asyncio.sleep(0.02)
    return batch


async def results(client: AsyncOpenAI, id: str | None) -> dict[str, Any]:
    assert id is not None
    lines = map(json.loads, (await client.files.content(id)).text.splitlines())
    return {each["custom_id"]: each["response"] for each in lines}


async def test_answers_and_errors(tmp_path: Path) -> None:
    async with serve_api(tmp_path, tokens=with_template(QWEN3), context=1024) as api, api.openai() as client:
        wrong = {"bad": CHAT | {"nonsense": 1}, "streamed": CHAT | {"stream": True}, "other": CHAT | {"model": "who"}}
        wrong["long"] = CHAT | {"stop": ["x"] * 300_000}  # decoded in a helper process
        many = [line(f"n{i}", CHAT | ({"service_tier": "auto"} if i else {})) for i in range(70)]
        many += [line(id, body) for id, body in wrong.items()]
        batch = await ended(client, (await begin(client, many)).id)
        assert (batch.status, batch.metadata, batch.endpoint) == ("completed", {"a": "b"}, "/v1/chat/completions")
        counts = batch.request_counts
        assert counts is not None and (counts.total, counts.completed, counts.failed) == (74, 70, 4)
        good, bad = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
        assert set(good) == {f"n{i}" for i in range(70)}
        assert all(each["body"]["choices"][0]["message"]["content"] == REPLY for each in good.values())
        assert {id: (each["status_code"], each["body"]["error"]["param"]) for id, each in bad.items()} == {
            "bad": (400, "nonsense"),
            "streamed": (400, "stream"),
            "other": (404, "model"),
            "long": (400, "stop"),
        }
        asked = await api.engine.saw(Generate)
        assert {message.slo.batch for message in asked} == {True}
        for endpoint, body, text in (
            ("/v1/completions", {"prompt": "x"}, lambda body: body["choices"][0]["text"]),
            (
                "/v1/completions",
                {"prompt": "x", "logprobs": 1},
                lambda body: "".join(body["choices"][0]["logprobs"]["tokens"]),
            ),
            ("/v1/responses", {"input": "x"}, lambda body: body["output"][0]["content"][0]["text"]),
            (
                "/v1/responses",
                {"input": [{"role": "user", "content": text} for text in ("old " * 1024, "x")], "truncation": "auto"},
                lambda body: body["output"][0]["content"][0]["text"],
            ),
        ):
            marked = f"\ufeff{json.dumps(line('a', body, endpoint))}"  # as editors on Windows save it
            one = await ended(client, (await begin(client, [marked], endpoint)).id)
            assert text((await results(client, one.output_file_id))["a"]["body"]) == REPLY
        assert [each.id async for each in client.batches.list(limit=1)][-1] == batch.id


async def test_files_that_are_no_batch(tmp_path: Path) -> None:
    async with serve_api(tmp_path, tokens=with_template(QWEN3)) as api, api.openai() as client:
        lines: list[Any] = [
            "{",
            line("a", CHAT),
            line("a", CHAT),
            line("b", CHAT, "/v1/completions"),
            {"custom_id": "c"},
        ]
        lines.append(line("d", CHAT | {"stop": "x" * (8 << 20)}))
        failed = await ended(client, (await begin(client, lines)).id)
        assert failed.status == "failed" and failed.errors is not None and failed.errors.data is not None
        assert [(problem.code, problem.line) for problem in failed.errors.data] == [
            ("invalid_json_line", 1),
            ("duplicate_custom_id", 3),
            ("mismatched_endpoint", 4),
            ("invalid_json_line", 5),
            ("line_too_long", 6),
        ]
        assert [problem.message for problem in failed.errors.data if problem.code == "invalid_json_line"] == [
            "the body is not JSON: it ends too early",
            "expected a field 'method', got none",
        ]
        assert failed.output_file_id is None
        with pytest.raises(openai.BadRequestError):
            await client.batches.cancel(failed.id)
        for call in (client.batches.retrieve("batch_x"), client.batches.cancel("batch_x")):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.NotFoundError, match="input_file_id"):
            await client.batches.create(input_file_id="file-x", endpoint="/v1/completions", completion_window="24h")
        rows = await client.files.create(file=b"{}", purpose="fine-tune")
        lines = await client.files.create(file=b"{}", purpose="batch")
        day: Any = {"anchor": "created_at", "seconds": 86400}
        asked: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError, match="purpose batch, got fine-tune") as caught:
            await client.batches.create(input_file_id=rows.id, **asked)
        assert caught.value.param == "input_file_id"
        with pytest.raises(openai.BadRequestError, match="output_expires_after is not supported"):
            await client.batches.create(input_file_id=lines.id, output_expires_after=day, **asked)


async def test_a_batch_goes_on_after_a_restart_and_is_cancelled(tmp_path: Path) -> None:
    lines = [line(f"n{i}", CHAT) for i in range(6)]
    async with serve_api(tmp_path, tokens=with_template(QWEN3)) as api, api.openai() as client:
        first = await ended(client, (await begin(client, lines)).id)
        await api.engine.die()
        waits, cancelled = (await begin(client, lines)).id, (await begin(client, lines)).id
        await ended(client, waits, "in_progress")
        await ended(client, cancelled, "in_progress")
        await client.batches.cancel(cancelled)
        found = await ended(client, cancelled)
        assert (found.status, found.output_file_id) == ("cancelled", None)
    path = tmp_path / "batches" / waits / "output.jsonl"
    kept = {"custom_id": "n0", "id": "batch_req_1", "response": {"status_code": 200, "request_id": "r", "body": {}}}
    path.write_text(json.dumps(kept) + '\n{"custom_id": "n1", "resp')
    async with serve_api(tmp_path, tokens=with_template(QWEN3)) as api, api.openai() as client:
        found = await ended(client, waits)
        good = await results(client, found.output_file_id)
        assert set(good) == {f"n{i}" for i in range(6)} and good["n0"]["body"] == {}
        assert found.request_counts is not None and found.request_counts.completed == 6
        asked = await api.engine.saw(Generate)
        assert len(asked) == 5
        assert [each.id async for each in client.batches.list()] == [cancelled, waits, first.id]
        assert await client.batches.retrieve(first.id) == first


async def test_a_batch_outlives_its_file_and_two_cancellations_are_one(tmp_path: Path) -> None:
    async with serve_api(tmp_path, tokens=with_template(QWEN3)) as api, api.openai() as client:
        await api.engine.die()
        lines = [line(f"n{i}", CHAT) for i in range(70)]
        deleted, cancelled = [await begin(client, lines) for _ in range(2)]
        for batch in (deleted, cancelled):
            await ended(client, batch.id, "in_progress")
            await client.files.delete(batch.input_file_id)
        both = await asyncio.gather(*(client.batches.cancel(cancelled.id) for _ in range(2)), return_exceptions=True)
        assert {each.status for each in both if not isinstance(each, BaseException)} <= {"cancelling", "cancelled"}
        await ended(client, cancelled.id, "cancelled")
        await api.start_engine()
        found = await ended(client, deleted.id)
        assert set(await results(client, found.output_file_id)) == {f"n{i}" for i in range(70)}
        assert not list((tmp_path / "batches").rglob("input.jsonl"))
        assert [file.id async for file in client.files.list()] == [found.output_file_id]


async def test_a_full_disk_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        async with serve_api(disk / "data", tokens=with_template(QWEN3)) as api, api.openai() as client:
            await api.engine.die()
            batch = await begin(client, [line(f"n{i}", CHAT) for i in range(5)])
            await ended(client, batch.id, "in_progress")
            fill(disk)
            await api.start_engine()
            while f"{batch.id} waits" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            (disk / "filler").unlink()
            found = await ended(client, batch.id)
            assert set(await results(client, found.output_file_id)) == {f"n{i}" for i in range(5)}


async def test_a_drain_leaves_a_batch_to_the_next_start(tmp_path: Path) -> None:
    async with serve_api(tmp_path, tokens=with_template(QWEN3)) as api, api.openai() as client:
        await api.engine.die()
        id = (await begin(client, [line("a", CHAT)])).id
        await ended(client, id, "in_progress")
        await api.service.drain(5)
        await api.start_engine()
        await asyncio.sleep(1.1)  # longer than a request waits that found no engine
        assert not api.engine.heard(Generate)
    async with serve_api(tmp_path, tokens=with_template(QWEN3)) as api, api.openai() as client:
        assert (await ended(client, id)).status == "completed"


async def run_alone(
    tmp_path: Path, answer: Answer, ids: Sequence[str], admit: Callable[[str], None] = lambda project: None
) -> tuple[BatchRecord, list[str]]:
    """Run a batch by a runner of its own; return its record, and the ids that are answered."""
    files, store = FileStore(tmp_path / "files"), BatchStore(tmp_path / "batches")
    source = tmp_path / "lines"
    source.write_text("\n".join(json.dumps(line(id, {"prompt": id}, "/v1/completions")) for id in ids))
    record = BatchRecord(
        id="batch_1",
        endpoint="/v1/completions",
        input_file_id=files.add(source, "lines", "batch").id,
        completion_window="24h",
        metadata=None,
        created_at=1.0,
    )
    runner = BatchRunner(store, files, {"/v1/completions": answer}, admit)
    await runner.open()
    await runner.create(record)
    while not store.get("batch_1").ended:  # noqa: ASYNC110 - nothing tells of its end
        await asyncio.sleep(0.01)
    await runner.close()
    found = store.get("batch_1")
    assert found.output_file_id is not None
    kept = map(json.loads, files.content(found.output_file_id).read_text().splitlines())
    return found, sorted(each["custom_id"] for each in kept)


async def test_a_batch_that_ends_by_an_internal_error_keeps_its_answers(tmp_path: Path) -> None:
    def answered_one() -> bool:
        return any(b"good" in path.read_bytes() for path in tmp_path.rglob(OUTPUT))

    async def answer(content: bytes) -> bytes:
        if b"bad" in content:
            while not answered_one():  # noqa: ASYNC110 - files send no event
                await asyncio.sleep(0.01)
            raise RuntimeError("no")
        return b"{}"

    found, answered = await run_alone(tmp_path, answer, ("good", "bad"))
    assert (found.status, answered) == ("failed", ["good"])


async def test_each_request_of_a_batch_counts_in_the_quota_and_waits_for_it(tmp_path: Path) -> None:
    async def answer(content: bytes) -> bytes:
        if len(tried) < 7:
            tried.append(content)
            raise QueueFull("a request that is sent again counts once")
        return b"{}"

    now, tried, refused = [0.0], list[bytes](), list[str]()
    quotas = Quotas(lambda: now[0])
    quotas.set("default", Quota(requests_per_minute=2))

    def admit(project: str) -> None:
        try:
            quotas.admit(project)
        except QuotaExceeded as error:
            refused.append(project)
            now[0] += error.retry_after
            raise QuotaExceeded(error.message, retry_after=0.001) from error

    found, answered = await run_alone(tmp_path, answer, [f"n{i}" for i in range(6)], admit)
    assert (found.status, len(answered)) == ("completed", 6)
    assert len(refused) == 4, "two of six came at once"
    assert now[0] == pytest.approx(4 * 30)
