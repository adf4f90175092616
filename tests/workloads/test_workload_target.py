"""The bridge from a replay to the SDK, over a transport in the daemon's place."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Awaitable

import msgspec
import pytest

from coserve.client import AsyncClient, MockTransport, Request, Response
from coserve.core.errors import AdapterNotFound, InvalidRequest, QueueFull, Unreachable
from coserve.core.schemas.adapters import DeletedAdapter
from coserve.core.schemas.generation import GenerateChunk
from coserve.core.schemas.jobs import DeletedJob, JobEvent
from coserve.core.schemas.service import ErrorBody, ErrorInfo
from coserve.core.training.jobs import JobState
from coserve.core.training.settings import TrainingSettings
from coserve.workloads.replay import ReplayResult, Rest, replay
from coserve.workloads.scenario import Scenario
from coserve.workloads.summary import summarise
from coserve.workloads.synthesis import make_trace
from coserve.workloads.target import NO_RETRIES, DaemonTarget
from tests.support.records import make_adapter_info, make_metrics
from tests.support.sdk import job

SCENARIO = Scenario(
    duration=0.05, rate=100, finetune_rows=3, adapters=2, rank=(4,), min_tokens=3, max_tokens=3, steps=2
)


def step(seq: int) -> JobEvent:
    metrics = make_metrics(seq, 2, 2.0, tokens=50, target_tokens=40)
    return JobEvent(seq=seq, job="j", created_at=0, level="info", type="metrics", message="", metrics=metrics)


def state(seq: int, value: JobState) -> JobEvent:
    return JobEvent(seq=seq, job="j", created_at=0, level="info", type="state", message="", state=value)


def sse(*events: msgspec.Struct) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)


def json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(status, {"content-type": "application/json"}, msgspec.json.encode(value))


class FakeDaemon:
    """Answers as the API does. `ranks`: the adapters that there are."""

    def __init__(self, ranks: dict[str, int], *, refuse: bool = False) -> None:
        self.ranks, self.refuse = ranks, refuse
        self.bodies: list[dict[str, object]] = []
        self.adapters: dict[str, str] = {}
        self.deleted_jobs: set[str] = set()

    def __call__(self, request: Request) -> Response:
        parts = request.path.strip("/").split("/")
        match request.method, parts:
            case "POST", ["generate"]:
                return self.generate(request)
            case "POST", ["finetune"]:
                return self.finetune(request)
            case "GET", ["finetune", id, "events"]:
                self.ranks.setdefault(self.adapters[id], 4)
                done = state(4, JobState.SUCCEEDED)
                body = sse(state(1, JobState.RUNNING), step(2), step(3), done)
                return Response(200, {"content-type": "text/event-stream"}, body)
            case "GET", ["finetune", id]:
                return json(job(JobState.SUCCEEDED, id, adapter=self.adapters[id]))
            case "GET", ["adapters", name]:
                return self.adapter(name)
            case "DELETE", ["finetune", id]:
                self.deleted_jobs.add(id)
                return json(DeletedJob(id=id, adapter=self.adapters[id], result=None))
        raise AssertionError(request)

    def generate(self, request: Request) -> Response:
        if self.refuse:
            return json(ErrorBody(error=ErrorInfo(code="queue_full", message="full")), 429)
        assert isinstance(request.body, bytes)
        self.bodies.append(msgspec.json.decode(request.body))
        chunk = GenerateChunk(id="r", adapter=None, version=None, seed=1, index=0, text="x", token_ids=[5])
        last = msgspec.structs.replace(chunk, token_ids=[6, 7], finish_reason="length")
        return Response(200, {"content-type": "text/event-stream"}, sse(chunk, last) + b"data: [DONE]\n\n")

    def finetune(self, request: Request) -> Response:
        if self.refuse:
            return json(ErrorBody(error=ErrorInfo(code="queue_full", message="full")), 429)
        assert isinstance(request.body, bytes)
        body = msgspec.json.decode(request.body)
        self.bodies.append(body)
        id = f"job-{len(self.adapters)}"
        self.adapters[id] = body["adapter"]
        return json(job(JobState.QUEUED, id, adapter=body["adapter"]))

    def adapter(self, name: str) -> Response:
        if name not in self.ranks:
            return json(ErrorBody(error=ErrorInfo(code="adapter_not_found", message=name)), 404)
        return json(make_adapter_info(name, rank=self.ranks[name]))


def play(daemon: FakeDaemon) -> tuple[int, ReplayResult]:
    async def main() -> tuple[int, ReplayResult]:
        async with AsyncClient(transport=MockTransport(daemon), retry=NO_RETRIES) as client:
            target = DaemonTarget(client, SCENARIO)
            made = await target.prepare()
            daemon.bodies.clear()
            trace = make_trace(SCENARIO, ["p"], [{"text": "row"}])
            return made, await replay(trace, target, rest=Rest.DRAIN)

    return asyncio.run(main())


def test_a_workload_through_the_sdk() -> None:
    daemon = FakeDaemon({"load-00": 4})
    made, run = play(daemon)
    assert made == 1
    assert [(sample.tokens, sample.error) for sample in run.samples] == [(3, None)] * 5
    jobs = [body for body in daemon.bodies if "data" in body]
    assert len(jobs) == len(run.jobs) > 0
    for body in jobs:
        assert body["continue_from"] == body["adapter"]
        assert msgspec.convert(body["training"], type=TrainingSettings) == SCENARIO.training
        assert "lora" not in body
    assert all(sample.state is JobState.SUCCEEDED and len(sample.trained) == 2 for sample in run.jobs)
    assert summarise(run).finetune_tokens == 100 * len(run.jobs)
    for body in (body for body in daemon.bodies if "prompt" in body):
        assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (3, True, True)


def test_a_refusal_is_a_result_and_is_not_tried_again() -> None:
    daemon = FakeDaemon({"load-00": 4, "load-01": 4}, refuse=True)
    _, run = play(daemon)
    assert Counter(sample.error for sample in run.samples) == {"queue_full": 5}


def test_what_keeps_the_adapters_from_being_made_is_raised_as_it_is() -> None:
    with pytest.raises(QueueFull):
        play(FakeDaemon({}, refuse=True))


def test_an_adapter_of_another_rank_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected load-00 to be of rank 4, got 8"):
        play(FakeDaemon({"load-00": 8}))


class PausingDaemon(FakeDaemon):
    """Its jobs become `ends` after their first step, and their events stay open."""

    def __init__(self, ends: JobState, error: ErrorInfo | None, now: JobState | None = None) -> None:
        super().__init__({"load-00": 4, "load-01": 4})
        self.ends, self.error, self.now = ends, error, now or ends

    def __call__(self, request: Request) -> Response:
        match request.method, request.path.strip("/").split("/"):
            case "GET", ["finetune", _, "events"]:
                return Response(200, {"content-type": "text/event-stream"}, self.events())
            case "GET", ["finetune", id]:
                found = job(self.now, id, adapter=self.adapters[id])
                return json(msgspec.structs.replace(found, error=self.error))
        return super().__call__(request)

    async def events(self) -> AsyncIterator[bytes]:
        yield sse(state(1, JobState.RUNNING), step(2), state(3, self.ends))
        if self.now is not self.ends:
            yield sse(step(4), state(5, JobState.SUCCEEDED))
        elif not self.ends.terminal:
            await asyncio.Event().wait()


CRASHED = ErrorInfo(code="engine_crashed", message="it died")


@pytest.mark.parametrize(
    ("ends", "error", "code", "message"),
    [
        (JobState.PAUSED, CRASHED, "engine_crashed", "it died"),
        (JobState.PAUSED, None, "job_error", "the job was paused"),
        (JobState.FAILED, ErrorInfo(code="non_finite_loss", message="NaN"), "non_finite_loss", "NaN"),
        (JobState.CANCELLED, None, None, None),
    ],
)
def test_a_job_that_stops_is_not_waited_for_and_says_why(
    ends: JobState, error: ErrorInfo | None, code: str | None, message: str | None
) -> None:
    _, run = play(PausingDaemon(ends, error))
    assert run.jobs and {(job.state, job.error, job.message) for job in run.jobs} == {(ends, code, message)}
    assert all(len(job.trained) == 1 for job in run.jobs)


def test_a_job_that_was_resumed_is_waited_for() -> None:
    _, run = play(PausingDaemon(JobState.PAUSED, CRASHED, now=JobState.RUNNING))
    assert run.jobs and {(job.state, job.error) for job in run.jobs} == {(JobState.SUCCEEDED, None)}
    assert all(len(job.trained) == 2 for job in run.jobs)


# ---- interrupted while the adapters are made


class SlowDaemon(FakeDaemon):
    """Holds each answer to `POST /finetune` until `answer` is set. A job is there from then on, and publishes unless
    cancelled."""

    def __init__(self, *, refused: str = "", broken: bool = False) -> None:
        super().__init__({})
        self.asked, self.answer = asyncio.Event(), asyncio.Event()
        self.refused, self.broken = refused, broken
        self.cancelled: set[str] = set()

    def __call__(self, request: Request) -> Response | Awaitable[Response]:  # type: ignore[override]
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["finetune"]:
                return self.held(request)
            case "POST", ["finetune", id, "cancel"]:
                self.cancelled.add(id)
                return json(job(JobState.CANCELLED, id, adapter=self.adapters[id]))
            case "DELETE", ["adapters", name]:
                return json(ErrorBody(error=ErrorInfo(code="adapter_not_found", message=name)), 404)
        return super().__call__(request)

    async def held(self, request: Request) -> Response:
        self.asked.set()
        assert isinstance(request.body, bytes)
        if self.refused and self.refused in msgspec.json.decode(request.body)["adapter"]:
            return json(ErrorBody(error=ErrorInfo(code="queue_full", message="full")), 429)
        await self.answer.wait()
        if self.broken:
            raise Unreachable("the connection broke", sent=True)
        return self.finetune(request)


async def interrupted(daemon: SlowDaemon, *, answered: bool = True) -> list[str]:
    """Cancel `prepare` while its submissions are under way; what `clean_up` could not delete."""
    async with AsyncClient(transport=MockTransport(daemon), retry=NO_RETRIES) as client:
        target = DaemonTarget(client, SCENARIO, prefix="bench-", submission_wait=120.0 if answered else 0.05)
        preparing = asyncio.create_task(target.prepare())
        await daemon.asked.wait()
        await asyncio.sleep(0.01)
        preparing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await preparing
        if answered:
            asyncio.get_running_loop().call_later(0.05, daemon.answer.set)
        kept = await target.clean_up()
        daemon.answer.set()
        await asyncio.sleep(0.01)
        return kept


async def test_jobs_submitted_as_the_run_is_interrupted_are_cancelled() -> None:
    daemon = SlowDaemon()
    assert await interrupted(daemon) == []
    assert set(daemon.adapters.values()) == {"bench-load-00", "bench-load-01"}
    assert daemon.cancelled == set(daemon.adapters)


async def test_adapters_of_jobs_that_may_be_there_are_named() -> None:
    names = ["bench-load-00", "bench-load-01"]
    assert await interrupted(SlowDaemon(broken=True)) == names
    assert await interrupted(SlowDaemon(), answered=False) == names


@pytest.mark.parametrize("at_once", [1, 2])
async def test_after_a_refusal_no_other_adapter_is_left(at_once: int) -> None:
    daemon = SlowDaemon(refused="load-00")
    async with AsyncClient(transport=MockTransport(daemon), retry=NO_RETRIES) as client:
        target = DaemonTarget(client, SCENARIO, prefix="bench-", prepared_at_once=at_once)
        with pytest.raises(QueueFull):
            await target.prepare()
        asyncio.get_running_loop().call_later(0.05, daemon.answer.set)
        assert await target.clean_up() == []
        await asyncio.sleep(0.1)
    assert daemon.cancelled == set(daemon.adapters)


class CrowdedDaemon(FakeDaemon):
    """Refuses each deletion once, and those beyond two at a time."""

    def __init__(self) -> None:
        super().__init__({})
        self.now, self.refused, self.deleted = 0, set[str](), set[str]()

    def __call__(self, request: Request) -> Response | Awaitable[Response]:  # type: ignore[override]
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["finetune", id, "cancel"]:
                return json(job(JobState.CANCELLED, id, adapter=self.adapters[id]))
            case "DELETE", ["adapters", name]:
                return self.delete(name)
        return super().__call__(request)

    async def delete(self, name: str) -> Response:
        self.now += 1
        crowded = self.now > 2
        await asyncio.sleep(0.01)
        self.now -= 1
        if crowded or name not in self.refused:
            self.refused.add(name)
            return json(ErrorBody(error=ErrorInfo(code="too_many_connections", message="busy")), 503)
        self.deleted.add(name)
        return json(DeletedAdapter(id=name, versions=[1]))


async def test_no_adapter_is_left_by_a_daemon_that_refuses_for_now() -> None:
    daemon, scenario = CrowdedDaemon(), dataclasses.replace(SCENARIO, adapters=12)
    async with AsyncClient(transport=MockTransport(daemon), retry=NO_RETRIES) as client:
        target = DaemonTarget(client, scenario, prefix="bench-", prepared_at_once=2)
        await target.prepare()
        assert len(target.made) == 12
        assert await target.clean_up() == []
    assert daemon.deleted == set(target.made)
    assert daemon.deleted_jobs == set(daemon.adapters)


async def test_a_name_that_no_adapter_can_have_is_refused() -> None:
    async with AsyncClient(transport=MockTransport(FakeDaemon({})), retry=NO_RETRIES) as client:
        with pytest.raises(InvalidRequest, match=r"prefix: expected a name of .*, got 'ü/load-00'"):
            await DaemonTarget(client, SCENARIO, prefix="ü/").prepare()


async def test_a_version_is_used_with_the_daemons_own_names_and_never_made() -> None:
    daemon = FakeDaemon({})
    async with AsyncClient(transport=MockTransport(daemon), retry=NO_RETRIES) as client:
        with pytest.raises(InvalidRequest, match=r"prefix: expected a name of .*, got 'bench-poet@7'"):
            await DaemonTarget(client, SCENARIO, prefix="bench-").prepare(["poet@7"])
        assert daemon.bodies == []
        with pytest.raises(AdapterNotFound):
            await DaemonTarget(client, SCENARIO).prepare(["poet@7"])
    assert "poet@7" not in [body.get("adapter") for body in daemon.bodies]
