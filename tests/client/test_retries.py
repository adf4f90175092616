"""When the SDK tries again, how long it waits, and what it never repeats."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.client import Response, RetryPolicy
from coserve.core import errors
from tests.support.sdk import GENERATED, Daemon, chunk, job, refusal, reply, stream_of


async def test_429_and_503_are_tried_again_after_what_the_daemon_asked_for() -> None:
    told = list[tuple[errors.CoserveError, float]]()
    daemon = Daemon(
        refusal(429, "queue_full", headers={"Retry-After": "3"}),
        refusal(503, "engine_unavailable"),
        reply(GENERATED),
        retry=RetryPolicy(on_wait=lambda *wait: told.append(wait)),
    )
    assert await daemon.client.generate("hi") == GENERATED
    first, second = daemon.naps
    assert 3 <= first <= 3.25
    assert 0.5 <= second <= 1
    assert [(error.status, seconds) for error, seconds in told] == [(429, first), (503, second)]
    assert len({request.body for request in daemon.requests}) == 1


async def test_attempts_end() -> None:
    daemon = Daemon(
        *[refusal(429, "queue_full", "full", headers={"Retry-After": "1"}) for _ in range(3)],
        retry=RetryPolicy(attempts=3),
    )
    with pytest.raises(errors.QueueFull, match="full") as caught:
        await daemon.client.generate("hi")
    assert len(daemon.requests) == 3
    assert caught.value.retry_after == 1


async def test_a_refusal_for_too_long_is_final() -> None:
    daemon = Daemon(refusal(503, "engine_unavailable", headers={"Retry-After": "3600"}))
    with pytest.raises(errors.EngineUnavailable):
        await daemon.client.generate("hi")
    assert daemon.naps == []


async def test_other_errors_are_final_and_say_what_the_daemon_said() -> None:
    daemon = Daemon(
        refusal(404, "adapter_not_found", "no adapter 'x'", field="adapter"),
        refusal(422, "malformed_row", "line 3: no text", field="data", line=3),
        refusal(507, "storage_full", "the disk is full"),
        refusal(401, "unauthorized"),
    )
    with pytest.raises(errors.AdapterNotFound, match="no adapter 'x'") as lost:
        await daemon.client.generate("hi", adapter="x")
    assert lost.value.field == "adapter"
    with pytest.raises(errors.MalformedRow, match=r"^data: line 3: no text$") as row:
        await daemon.client.finetune("a", [])
    assert row.value.line == 3 and row.value.field == "data"
    with pytest.raises(errors.StorageFull):
        await daemon.client.finetune("a", [])
    with pytest.raises(errors.Unauthorized):
        await daemon.client.jobs()
    assert daemon.naps == []


@pytest.mark.parametrize(
    ("status", "error"),
    [(418, errors.RequestError), (502, errors.InternalError), (401, errors.Unauthorized), (302, errors.RequestError)],
)
@pytest.mark.parametrize("body", [b"<html>", b"\xff", b'{"error": {"code": "of_a_newer_daemon", "message": "m"}}'])
async def test_what_no_code_names_the_status_does(status: int, error: type[Exception], body: bytes) -> None:
    daemon = Daemon(Response(status, {}, body))
    with pytest.raises(error) as caught:
        await daemon.client.generate("hi")
    assert type(caught.value) is error
    assert "<html>" not in str(caught.value)


async def test_without_a_connection_everything_is_tried_again() -> None:
    daemon = Daemon(errors.Unreachable("refused"), reply(GENERATED), errors.Unreachable("refused"), reply(job()))
    assert await daemon.client.generate("hi") == GENERATED
    assert (await daemon.client.finetune("a", [{"text": "x"}])).id == "job-1"
    assert len(daemon.naps) == 2


async def test_what_may_have_been_done_is_not_done_again() -> None:
    daemon = Daemon(*[errors.Unreachable("broke", sent=True) for _ in range(4)])
    for attempt in (
        daemon.client.generate("hi"),
        daemon.client.delete_adapter("a"),
        daemon.client.import_adapter("a", path="x"),
    ):
        with pytest.raises(errors.Unreachable):
            await attempt
    assert len(daemon.requests) == 3


async def test_a_job_has_one_key_for_all_attempts_and_another_for_the_next_job() -> None:
    daemon = Daemon(
        errors.Unreachable("broke", sent=True),
        errors.Unreachable("broke", sent=True),
        reply(job()),
        reply(job()),
        reply(job()),
    )
    await daemon.client.finetune("a", [{"text": "x"}])
    await daemon.client.finetune("a", [{"text": "x"}])
    await daemon.client.finetune("a", [{"text": "x"}], idempotency_key="mine")
    keys = [request.headers["Idempotency-Key"] for request in daemon.requests]
    assert keys[0] == keys[1] == keys[2] != keys[3] and keys[4] == "mine"


async def test_reads_are_repeated() -> None:
    daemon = Daemon(errors.Unreachable("broke", sent=True), reply(job()))
    assert (await daemon.client.job("job-1")).info == job()


async def test_a_stream_is_tried_again_until_it_begins_and_never_after() -> None:
    daemon = Daemon(refusal(429, "queue_full"), stream_of(chunk("a"), end=False))
    got = []
    with pytest.raises(errors.Unreachable, match="broke off"):
        async for piece in daemon.client.stream("hi"):
            got.append(piece.text)  # noqa: PERF401 - kept although the loop raises
    assert got == ["a"] and len(daemon.requests) == 2


async def test_an_answer_of_another_version_says_so() -> None:
    daemon = Daemon(reply(chunk("x")))
    with pytest.raises(errors.InternalError, match="the daemon's response"):
        await daemon.client.generate("hi")


@given(st.integers(1, 1000), st.floats(0, 60), st.integers(0, 99))
def test_delays_stay_within_their_bounds(attempt: int, asked: float, seed: int) -> None:
    policy = RetryPolicy()
    delay = policy.delay(attempt, errors.QueueFull("full", retry_after=asked), random.Random(seed))
    assert asked <= delay <= max(asked, policy.longest) + policy.longest / 4
    assert delay >= min(policy.longest, policy.first * 2.0 ** min(attempt - 1, 30)) / 2 or asked > 0
    plain = policy.delay(attempt, errors.InvalidRequest("x"), random.Random(seed))
    assert policy.first / 2 <= plain <= policy.longest
