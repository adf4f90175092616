"""What each call sends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coserve.client import AsyncClient, MockTransport, Request, Response, RetryPolicy, Upload
from coserve.core.errors import (
    CoserveError,
    EngineUnavailable,
    ForbiddenOrigin,
    InvalidRequest,
    TooManyConnections,
    Unreachable,
)
from coserve.core.health import Health
from coserve.core.messages import ChatMessage
from coserve.core.schemas.adapters import AdapterList, DeletedAdapter
from coserve.core.schemas.jobs import JobList
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from tests.support.records import make_adapter_info
from tests.support.sdk import GENERATED, Daemon, chunk, job, refusal, reply, stream_of

ADAPTER = make_adapter_info("a", 2)
HEALTH = Health(
    status="starting",
    version="0",
    uptime=1.0,
    engine_alive=False,
    engine_restarts=1,
    base=None,
    lora_backend=None,
    kv_tokens=None,
    notes=[],
    waiting=0,
    running=0,
    jobs=0,
    adapters_resident=0,
)


def sent(request: Request) -> tuple[str, str, Any]:
    body = request.body
    return request.method, request.path, msgspec.json.decode(body) if isinstance(body, bytes) else body


async def test_generate_sends_what_was_said_and_nothing_else() -> None:
    daemon = Daemon(*[reply(GENERATED) for _ in range(3)])
    assert await daemon.client.generate("hi") == GENERATED
    await daemon.client.generate((1, 2), adapter="a@1", temperature=0, stop=["x"], seed=3)
    turns = [("user", "hi"), ("assistant", "ho")]
    messages = [{"role": "user", "content": "hi"}, ChatMessage(role="assistant", content="ho")]
    await daemon.client.generate(messages=messages)
    assert [sent(request) for request in daemon.requests] == [
        ("POST", "/generate", {"prompt": "hi"}),
        ("POST", "/generate", {"prompt": [1, 2], "adapter": "a@1", "temperature": 0, "stop": ["x"], "seed": 3}),
        ("POST", "/generate", {"messages": [{"role": role, "content": text} for role, text in turns]}),
    ]
    assert daemon.requests[0].headers["Authorization"] == "Bearer key"


async def test_wrong_arguments_are_found_here() -> None:
    daemon = Daemon()
    with pytest.raises(TypeError, match="tempratur"):
        await daemon.client.generate("hi", tempratur=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest) as caught:
        await daemon.client.finetune("a", [], lora={"rank": 8})
    assert caught.value.field == "lora.rank"
    with pytest.raises(InvalidRequest):
        await daemon.client.finetune("a", [{"text": "x"}], file=b"{}")
    for rows, field in (
        ({"text": "x"}, "data"),
        ([{"text": "x"}, "y"], "data[1]"),
        ([{"messages": [{"role": "user", "content": "x", "weight": float("nan")}]}], "data[0].messages[0].weight"),
    ):
        with pytest.raises(InvalidRequest, match="expected") as caught:
            await daemon.client.finetune("a", rows)  # type: ignore[arg-type]
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="one of data, file and path"):
        await daemon.client.finetune("a", [{"text": "x"}], path="rows.jsonl")
    with pytest.raises(InvalidRequest):
        await daemon.client.import_adapter("a")
    with pytest.raises(InvalidRequest, match=r"expected a folder of PEFT files"):
        await daemon.client.import_adapter("a", Path("/nonexistent"))
    assert daemon.requests == []


async def test_a_stream_that_fails_raises_what_failed() -> None:
    body = b'event: error\ndata: {"error": {"code": "engine_unavailable", "message": "gone"}}\n\n'
    daemon = Daemon(Response(200, {}, body))
    with pytest.raises(EngineUnavailable, match="gone"):
        async for _ in daemon.client.stream("hi"):
            pass


async def test_a_stream_that_is_left_lets_go_of_its_connection() -> None:
    closed: list[bool] = []
    body = stream_of(chunk("a"), chunk("b"))
    daemon = Daemon(Response(200, {}, aiter(body), close=lambda: closed.append(True)))
    stream = daemon.client.stream("hi")
    assert (await anext(stream)).text == "a"
    assert not closed
    await stream.aclose()
    assert closed


async def test_many_rows_are_sent_as_a_file() -> None:
    rows = [{"text": "x" * (1 << 20), "row": row} for row in range(9)]
    daemon = Daemon(reply(job(), 202), reply(job(), 202))
    await daemon.client.finetune("a", iter(rows), lora={"r": 4})
    await daemon.client.finetune("a", rows[:7])
    upload, inline = [sent(request)[2] for request in daemon.requests]
    assert isinstance(upload, Upload)
    settings = msgspec.json.decode(upload.settings)
    assert "data" not in settings and settings["lora"]["r"] == 4
    ((_, content),) = upload.files
    assert isinstance(content, bytes) and [msgspec.json.decode(line) for line in content.splitlines()] == rows
    assert content.endswith(b"\n"), "as a file of the same rows"
    assert inline["data"] == rows[:7]


async def test_finetune_takes_a_table_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    daemon = Daemon(reply(job(), 202))
    await daemon.client.finetune("a", pandas.DataFrame([{"text": "x", "n": 1}, {"text": "y"}]))
    assert sent(daemon.requests[0])[2]["data"] == [{"text": "x", "n": 1.0}, {"text": "y", "n": None}]


async def test_finetune_takes_rows_a_file_or_a_path(tmp_path: Path) -> None:
    corpus = tmp_path / "rows.jsonl"
    corpus.write_text('{"text": "x"}\n')
    daemon = Daemon(*[reply(job(), 202) for _ in range(4)])
    await daemon.client.finetune(
        "a", [{"text": "x"}], lora={"r": 4}, training=TrainingSettings(steps=2), metadata={"who": "me"}
    )
    await daemon.client.finetune("a", path="rows.jsonl", continue_from="a@1", teacher="b")
    await daemon.client.finetune("a", file=corpus, lora=LoraSettings(r=2))
    await daemon.client.finetune("a", file=b"{}\n")
    rows, path, file, content = [sent(request)[2] for request in daemon.requests]
    assert rows["data"] == [{"text": "x"}] and rows["lora"]["r"] == 4 and rows["training"]["steps"] == 2
    assert rows["metadata"] == {"who": "me"}
    assert path == {"adapter": "a", "path": "rows.jsonl", "continue_from": "a@1", "teacher": "b"}
    assert isinstance(file, Upload) and file.files == (("corpus", corpus),)
    assert msgspec.json.decode(file.settings)["lora"]["r"] == 2
    assert isinstance(content, Upload) and content.files == (("corpus", b"{}\n"),)
    assert {sent(request)[:2] for request in daemon.requests} == {("POST", "/finetune")}
    with pytest.raises(InvalidRequest, match="cartridge"):
        await daemon.client.finetune("a", path="rows.jsonl", lora=LoraSettings(r=2, cartridge=True))


@pytest.mark.parametrize("named", [str, Path])
async def test_finetune_takes_the_path_of_a_file_as_data_too(tmp_path: Path, named: type) -> None:
    corpus = tmp_path / "rows.jsonl"
    corpus.write_text('{"text": "x"}\n')
    daemon = Daemon(reply(job(), 202), reply(job(), 202))
    await daemon.client.finetune("a", named(corpus))
    await daemon.client.finetune("a", file=named(corpus))
    for request in daemon.requests:
        assert isinstance(request.body, Upload) and request.body.files == (("corpus", corpus),)


async def test_a_file_that_is_missing_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    daemon = Daemon()
    for path, says in ((tmp_path / "rows.jsonl", "nothing there"), (tmp_path, "a folder")):
        for given in ({"data": str(path)}, {"file": str(path)}, {"file": path}):
            with pytest.raises(InvalidRequest, match=rf"^expected a file, got .*: {says}$"):
                await daemon.client.finetune("a", **given)  # type: ignore[arg-type]
    assert daemon.requests == []


async def test_rows_that_lost_a_part_are_warned_of() -> None:
    daemon = Daemon(reply(msgspec.structs.replace(job(), rows=3, rows_cut=1), 202), reply(job(), 202))
    with pytest.warns(UserWarning, match="1 of 3 rows was too long and lost a part") as caught:
        await daemon.client.finetune("a", [{"text": "x"}])
    assert [warning.filename for warning in caught] == [__file__], "where the user's filters look"
    await daemon.client.finetune("a", [{"text": "x"}])  # warnings are errors in these tests


async def test_jobs() -> None:
    page = JobList(data=[job()], has_more=True)
    daemon = Daemon(reply(page), reply(page), *[reply(job()) for _ in range(5)])
    assert await daemon.client.jobs() == page
    await daemon.client.jobs(after="job-1", limit=5)
    handle = await daemon.client.job("job-1")
    await handle.refresh()
    await handle.pause()
    await handle.resume()
    await handle.cancel()
    assert [(r.method, r.path, r.query) for r in daemon.requests] == [
        ("GET", "/finetune", ()),
        ("GET", "/finetune", (("after", "job-1"), ("limit", "5"))),
        ("GET", "/finetune/job-1", ()),
        ("GET", "/finetune/job-1", ()),
        ("POST", "/finetune/job-1/pause", ()),
        ("POST", "/finetune/job-1/resume", ()),
        ("POST", "/finetune/job-1/cancel", ()),
    ]
    assert repr(handle) == "<AsyncJobHandle job-1 a@1 queued>"


async def test_adapters(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (tmp_path / name).write_text(name)
    page = AdapterList(data=[ADAPTER], has_more=False)
    gone = DeletedAdapter(id="a", versions=[1, 2])
    daemon = Daemon(reply(page), reply(ADAPTER), reply(ADAPTER, 201), reply(ADAPTER, 201), reply(gone), reply(ADAPTER))
    assert await daemon.client.adapters() == page
    assert await daemon.client.adapter("a@2") == ADAPTER
    await daemon.client.import_adapter("a", tmp_path)
    await daemon.client.import_adapter("a", path="folder")
    assert await daemon.client.delete_adapter("a") == gone
    await daemon.client.adapter("a/../b?c")
    upload = daemon.requests[2].body
    assert isinstance(upload, Upload) and upload.settings == b'{"name":"a"}'
    assert [name for name, _ in upload.files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert sent(daemon.requests[3]) == ("POST", "/adapters", {"name": "a", "path": "folder"})
    assert [request.path for request in daemon.requests[4:]] == ["/adapters/a", "/adapters/a%2F..%2Fb%3Fc"]


async def test_a_folder_without_peft_files_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    daemon = Daemon()
    with pytest.raises(InvalidRequest, match="got nothing"):
        await daemon.client.import_adapter("a", tmp_path)
    for name in ("checkpoint-20", "checkpoint-100"):
        (tmp_path / name).mkdir()
    with pytest.raises(InvalidRequest, match=r"'adapter_config.json' in the folder, got checkpoint-100, checkpoint-20"):
        await daemon.client.import_adapter("a", tmp_path)
    assert daemon.requests == []


async def test_adapters_come_from_archives_and_urls(tmp_path: Path) -> None:
    """A URL is read here, by fsspec."""
    from fsspec.implementations.memory import MemoryFileSystem

    files = MemoryFileSystem()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        files.pipe_file(f"/poet/{name}", name.encode())
    for end in ("", "?signature=a/b"):
        files.pipe_file(f"/poet.tar.gz{end}", b"packed")
    (tmp_path / "poet.zip").write_bytes(b"packed")
    archives = [str(tmp_path / "poet.zip"), "memory://poet.tar.gz", "memory://poet.tar.gz?signature=a/b"]
    seen = list[tuple[str, bytes]]()

    def answer(request: Request) -> Response:
        assert isinstance(request.body, Upload)
        seen.extend((name, path.read_bytes()) for name, path in request.body.files if isinstance(path, Path))
        return reply(ADAPTER, 201)

    client = AsyncClient(transport=MockTransport(answer))
    for source in (*archives, "memory://poet"):
        await client.import_adapter("a", source)
    folder = [(name, name.encode()) for name in ("adapter_config.json", "adapter_model.safetensors")]
    assert seen == [("poet.zip", b"packed"), *[("poet.tar.gz", b"packed")] * 2, *folder]
    with pytest.raises(InvalidRequest, match="FileNotFoundError"):
        await client.import_adapter("a", "memory://nothing")
    with pytest.raises(InvalidRequest, match="unknown"):
        await client.import_adapter("a", "unknown://poet")


async def test_health_metrics_and_description() -> None:
    daemon = Daemon(reply(HEALTH, 503), Response(200, {}, b"a 1\n"), Response(200, {}, b'{"openapi": "3.1.0"}'))
    assert (await daemon.client.health()).status == "starting", "an answer, not an error, and at once"
    assert await daemon.client.metrics() == "a 1\n"
    assert (await daemon.client.openapi())["openapi"] == "3.1.0"


async def test_wait_ready_waits_for_a_daemon_that_starts_and_warms_up() -> None:
    ready = msgspec.structs.replace(HEALTH, status="ready", engine_alive=True)
    refused = [Unreachable("nobody there", sent=False) for _ in range(6)]
    warming = [reply(HEALTH, 503, Retry_After="7"), reply(HEALTH, 503)]
    daemon = Daemon(*refused, *warming, reply(ready), retry=RetryPolicy(attempts=1))
    assert await daemon.client.wait_ready() == ready
    assert {request.path for request in daemon.requests} == {"/health/ready"}
    assert 7 <= daemon.naps[6] < 8
    assert all(nap <= 2 for nap in (*daemon.naps[:6], daemon.naps[7]))


async def test_wait_ready_gives_up_after_its_timeout() -> None:
    async def forever(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with AsyncClient(transport=MockTransport(forever)) as client:
        with pytest.raises(TimeoutError, match="not ready after"):
            await client.wait_ready(timeout=0.01)
    daemon = Daemon(refusal(403, "forbidden_origin"))
    with pytest.raises(ForbiddenOrigin):
        await daemon.client.wait_ready()


@pytest.mark.parametrize(
    ("status", "error"), [(503, TooManyConnections), (403, ForbiddenOrigin)], ids=lambda value: str(value)
)
async def test_a_refusal_is_no_health(status: int, error: type[CoserveError]) -> None:
    """Though a health may have the status 503, too."""
    daemon = Daemon(refusal(status, error.code))
    with pytest.raises(error):
        await daemon.client.health()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
async def test_a_number_that_json_lacks_is_refused_and_not_sent_as_null(number: float) -> None:
    daemon = Daemon()
    with pytest.raises(InvalidRequest, match="expected a finite number") as caught:
        await daemon.client.convert_adapter("a", 2, max_error=number)
    assert caught.value.field == "max_error"
    with pytest.raises(InvalidRequest):
        await daemon.client.generate("hi", slo_e2e=number)
    with pytest.raises(InvalidRequest) as caught:
        await daemon.client.generate("hi", logit_bias={7: number})
    assert caught.value.field == "logit_bias.7"
    for file in (None, b"{}"):
        with pytest.raises(InvalidRequest) as caught:
            rows = [{"text": "a"}] if file is None else None
            await daemon.client.finetune("a", rows, file=file, training={"learning_rate": number})
        assert caught.value.field == "training.learning_rate"
