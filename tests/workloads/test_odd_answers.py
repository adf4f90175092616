"""What OpenAI-style servers send that is no answer: each is an error of its request, and the run goes on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest
from aiohttp import web

from coserve.core.errors import CoserveError, InternalError, Unreachable
from coserve.workloads.gauges import read_snapshot
from coserve.workloads.openai_target import OpenAITarget
from coserve.workloads.replay import ReplayResult, Rest, Sample, replay
from coserve.workloads.scenario import Scenario
from coserve.workloads.synthesis import make_trace
from tests.support.fake_openai import BASE, FakeOpenAI, serve_openai

SCENARIO = Scenario(duration=0.2, rate=15, adapters=0, min_tokens=3, max_tokens=3, finetune_rows=0)
SOUND = b'data: {"choices": [{"text": "x"}]}\n\n'
DONE = b"data: [DONE]\n\n"
DEEP = b"[" * 100_000 + b"]" * 100_000


@dataclass
class Odd(FakeOpenAI):
    """Its second answer, and if `always` each, is `content` as it stands, with `status`."""

    content: bytes = b""
    always: bool = True
    gauges: bytes = b""
    listed: bytes = b""
    hold: bool = False
    """Keep the connections open after `content`, and do not answer `/v1/models`."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if not self.always and len(self.bodies) != 1:
            code, self.status = self.status, 200
            try:
                return await super().complete(request)
            finally:
                self.status = code
        self.bodies.append({})
        response = web.StreamResponse(status=self.status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(self.content)
        await self._held(request)
        return response

    async def _held(self, request: web.Request) -> None:
        while self.hold and request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(body=self.gauges, content_type="text/plain", charset="utf-8")

    async def list_models(self, request: web.Request) -> web.Response:
        await self._held(request)
        return web.Response(body=self.listed, content_type="application/json", charset="utf-8")


def play(server: FakeOpenAI, scenario: Scenario = SCENARIO) -> ReplayResult:
    async def main() -> ReplayResult:
        async with serve_openai(server), OpenAITarget(server.url, model=BASE) as target:
            return await replay(
                make_trace(scenario, ["one two three"], []),
                target,
                rest=Rest.LEAVE,
                request_timeout=120.0,
                probe=target.probe,
                probe_interval=0.05,
            )

    return asyncio.run(main())


def sample(content: bytes, hold: bool = False) -> Sample:
    """Of the one request that is answered so."""
    (found,) = play(
        Odd(content=content, hold=hold),
        Scenario(duration=0.05, rate=10, adapters=0, finetune_rows=0, min_tokens=3, max_tokens=3),
    ).samples
    return found


@pytest.mark.parametrize(
    ("event", "code", "message"),
    [
        (
            b'data: {"object": "error", "message": "CUDA out of memory", "code": 500}\n\n',
            "internal_error",
            "the stream ended with an error: CUDA out of memory",
        ),
        (b'event: error\ndata: {"message": "boom"}\n\n', "internal_error", "the stream ended with an error: boom"),
        (b"event: error\ndata: boom\n\n", "internal_error", "the stream ended with an error: boom"),
        (b"event: error\ndata: " + DEEP + b"\n\n", "internal_error", "the stream ended with an error: [[["),
        (b'data: {"error": {"code": "out_of_memory", "message": "m"}}\n\n', "out_of_memory", "m"),
        (b'data: {"error": {"code": 400, "message": "m"}}\n\n', "internal_error", "the stream ended with an error: m"),
        (b'data: {"error": "boom"}\n\n', "internal_error", 'the stream ended with an error: {"error": "boom"}'),
        (b'data: {"detail": "boom"}\n\n', "internal_error", 'expected a chunk of a completion, got {"detail": "boom"}'),
        (b'data: {"x": ' + DEEP + b"}\n\n", "internal_error", 'expected a chunk of a completion, got {"x": [[['),
        (b'data: {"choices": [], "usage": {"completion_tokens": -5}}\n\n', "internal_error", "expected a chunk"),
        (
            b'data: {"choices": [], "usage": {"completion_tokens": 1' + b"0" * 30 + b"}}\n\n",
            "internal_error",
            "expected a chunk",
        ),
    ],
)
def test_an_error_in_the_stream_is_no_answer(event: bytes, code: str, message: str) -> None:
    found = sample(SOUND * 3 + event + DONE)
    assert found.error == code and found.message is not None and found.message.startswith(message)


@pytest.mark.parametrize(
    "end",
    [
        DONE,
        b"data:[DONE] \n\n",
        b'data: {"usage": {"prompt_tokens": 2, "completion_tokens": 3}}\n\n' + DONE,
        b'data: {"error": null, "choices": []}\n\n' + DONE,
        DONE + b"data: what follows is not read\n\n",
    ],
)
def test_an_answer_ends_with_its_stop_mark(end: bytes) -> None:
    found = sample(SOUND * 3 + end)
    assert (found.error, found.tokens) == (None, 3)


def test_an_answer_is_complete_though_the_connection_stays_open() -> None:
    found = sample(SOUND * 3 + DONE, hold=True)
    assert (found.error, found.tokens) == (None, 3)


def chunk(text: str, end: str | None = None, counted: int | None = None) -> bytes:
    usage = {} if counted is None else {"usage": {"prompt_tokens": 2, "completion_tokens": counted}}
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": end}], **usage}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("content", "tokens", "message"),
    [
        (chunk("x", "stop", 1), 1, "expected 3 tokens, got 1 (finish reason: stop)"),
        (chunk("x", None, 1) + chunk("y", "length", 2), 2, "expected 3 tokens, got 2 (finish reason: length)"),
        (
            chunk("x y", None) + chunk("", "stop") + b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n',
            2,
            "expected 3 tokens, got 2 (finish reason: stop)",
        ),
        (chunk("x", None, 2), 2, "expected 3 tokens, got 2"),
        (chunk("x y z", "length", 3), 3, None),
        (chunk("x y z"), 1, None),
        (chunk("x y", "stop"), 1, None),
    ],
)
def test_an_answer_that_the_server_counts_as_too_short_is_an_error(
    content: bytes, tokens: int, message: str | None
) -> None:
    found = sample(content + DONE)
    assert (found.tokens, found.message) == (tokens, message)
    assert found.error == (message and "short_answer")


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (400, b'{"error": {"message": "caf\xe9"}}'),
        (500, b'{"x": ' + DEEP + b', "error": {}}'),
        (200, b'data: {"choices": [{"text": "\xff"}]}\n\ndata: {"x": ' + DEEP + b"}\n\n"),
    ],
)
def test_one_odd_answer_is_an_error_of_its_request_alone(status: int, content: bytes) -> None:
    run = play(Odd(status=status, content=content, always=False))
    errors = [found.error for found in run.samples]
    assert len(errors) == 3 and errors.count(None) == 2 and {*errors} - {None} <= {"invalid_request", "internal_error"}


@pytest.mark.parametrize(
    "line", ["vllm:num_requests_waiting oops", 'vllm:num_requests_waiting{a="b 3', "vllm:num_requests_waiting"]
)
def test_gauges_that_cannot_be_read_are_missing(line: str) -> None:
    with pytest.raises(InternalError, match="expected gauges"):
        read_snapshot(f"{line}\n", 0.0)
    run = play(Odd(content=SOUND * 3 + DONE, gauges=line.encode()))
    assert run.snapshots == () and {found.error for found in run.samples} == {None}


def test_gauges_beside_bytes_that_are_no_text_are_read() -> None:
    run = play(Odd(content=SOUND * 3 + DONE, gauges=b"# \xff\nvllm:num_requests_waiting 3\n"))
    assert {snapshot.waiting for snapshot in run.snapshots} == {3.0}


def test_a_gauge_that_is_no_number_is_missing() -> None:
    page = "vllm:num_requests_waiting NaN\nvllm:kv_cache_usage_perc +Inf\nvllm:num_requests_running 2\n"
    found = read_snapshot(page, 0.0)
    assert (found.waiting, found.cache, found.running) == (None, None, 2.0)


def models(server: FakeOpenAI) -> CoserveError:
    async def main() -> None:
        async with serve_openai(server), OpenAITarget(server.url, model=BASE, models_wait=0.2) as target:
            await target.models()

    with pytest.raises(Unreachable) as caught:
        asyncio.run(main())
    return caught.value


@pytest.mark.parametrize(
    "content", [b'{"data": [{"id": "\xff"}]}', b'{"data": [], "x": ' + DEEP + b"}", b"{}", b"oops"]
)
def test_models_that_cannot_be_read_are_one_clear_error(content: bytes) -> None:
    assert str(models(Odd(listed=content))).startswith("no OpenAI-style server answers at http://127.0.0.1:")


def test_a_server_that_never_lists_its_models_is_not_waited_for() -> None:
    assert str(models(Odd(hold=True))).endswith(": no list of models within 0.2 s")
