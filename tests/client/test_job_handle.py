"""Following a job: each event once, whatever breaks; waiting by events, never by asking again and again."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from coserve.client import AsyncJobHandle, Response, RetryPolicy
from coserve.client.progress import Bar, Lines
from coserve.core.errors import JobError, JobNotFound, NonFiniteLoss, Unreachable
from coserve.core.schemas.documents import DocumentJob, DocumentSettings, Phase
from coserve.core.schemas.jobs import JobEvent, Sample
from coserve.core.schemas.service import ErrorInfo
from coserve.core.training.jobs import JobState
from tests.support.sdk import Daemon, job, job_event, refusal, reply, sse, streamed

QUEUED, RUNNING, DONE = job_event(1, JobState.QUEUED), job_event(2, JobState.RUNNING), job_event(5, JobState.SUCCEEDED)
STORY = [QUEUED, RUNNING, job_event(3, step=1), job_event(4, step=2), DONE]


def events(*told: JobEvent, breaks: bool = False) -> Response:
    async def body():
        async for piece in streamed([b": \n\n", *sse(*told, ids=[event.seq for event in told])]):
            yield piece
        if breaks:
            raise Unreachable("the response broke off", sent=True)

    return Response(200, {}, body())


def handle(daemon: Daemon) -> AsyncJobHandle:
    return AsyncJobHandle(daemon.caller, job())


async def test_the_story_to_its_end() -> None:
    daemon = Daemon(events(*STORY))
    assert [event async for event in handle(daemon).events()] == STORY
    assert daemon.requests[0].headers["Last-Event-ID"] == "0"


async def test_a_broken_connection_goes_on_where_it_broke() -> None:
    daemon = Daemon(
        events(*STORY[:2], breaks=True),
        refusal(503, "engine_unavailable", headers={"Retry-After": "2"}),
        Unreachable("refused"),
        events(STORY[2]),  # a clean end before the job's
        reply(job(JobState.RUNNING)),
        events(*STORY[3:]),
    )
    assert [event async for event in handle(daemon).events()] == STORY
    followed = [request for request in daemon.requests if request.path.endswith("/events")]
    assert [request.headers["Last-Event-ID"] for request in followed] == ["0", "2", "2", "2", "3"]
    assert len(daemon.naps) == 4
    assert daemon.naps[1] >= 2


async def test_after_the_last_event_there_is_nothing_to_wait_for() -> None:
    daemon = Daemon(events(), reply(job(JobState.SUCCEEDED)))
    assert [event async for event in handle(daemon).events(after=5)] == []
    assert daemon.naps == []


async def test_a_daemon_that_stays_away_is_given_up() -> None:
    daemon = Daemon(*[Unreachable("refused") for _ in range(9)], retry=RetryPolicy(reconnects=3))
    with pytest.raises(Unreachable, match="refused"):
        async for _ in handle(daemon).events():
            pass
    assert len(daemon.requests) == 4


async def test_a_job_that_is_not_there_is_not_waited_for() -> None:
    daemon = Daemon(refusal(404, "job_not_found"))
    with pytest.raises(JobNotFound):
        await handle(daemon).wait()


async def test_wait_returns_the_finished_job() -> None:
    daemon = Daemon(events(*STORY), reply(job(JobState.SUCCEEDED, result="a@1")))
    waited = handle(daemon)
    assert (await waited.wait(progress=False)).result == "a@1"
    assert waited.info.state is JobState.SUCCEEDED
    assert len(daemon.requests) == 2, "one stream and one look at the end: no polling"


@pytest.mark.parametrize(("code", "error"), [("non_finite_loss", NonFiniteLoss), ("of_a_newer_daemon", JobError)])
async def test_wait_raises_what_made_the_job_fail(code: str, error: type[Exception]) -> None:
    failed = job(JobState.FAILED, error=ErrorInfo(code=code, message="at step 3"))
    daemon = Daemon(*[answer for _ in range(2) for answer in (events(job_event(1, JobState.FAILED)), reply(failed))])
    with pytest.raises(error, match="at step 3"):
        await handle(daemon).wait()
    assert await handle(daemon).wait(check=False) == failed


async def test_wait_ends_in_time() -> None:
    async def nothing():
        await asyncio.Event().wait()
        yield b""

    daemon = Daemon(Response(200, {}, nothing()))
    with pytest.raises(TimeoutError, match=r"job job-1 had not ended after 0.01 s; it goes on"):
        await handle(daemon).wait(timeout=0.01)


async def test_the_bar_shows_steps_loss_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    sample = Sample(step=2, prompt=1, text="[bold]it says", finish_reason="stop")
    said = JobEvent(seq=5, job="job-1", created_at=1.0, level="info", type="sample", message="", sample=sample)
    story = [*STORY[:-1], said, job_event(6, JobState.SUCCEEDED)]
    daemon = Daemon(events(*story), reply(job(JobState.SUCCEEDED)), events(*STORY), reply(job(JobState.SUCCEEDED)))
    await handle(daemon).wait(progress=True)
    shown = capsys.readouterr()
    assert "step 2, sample 1:\n  [bold]it says\n" in shown.err
    assert "a@1" in shown.err and "2/2" in shown.err and shown.out == ""
    await handle(daemon).wait()
    assert capsys.readouterr().err == "", "no bar where there is no terminal"


@pytest.mark.parametrize(("progress", "shown"), [(None, "step 2, sample 0:\n  [bold]it\n  says\n"), (False, "")])
async def test_samples_are_plain_lines_where_there_is_no_terminal(
    progress: bool | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = Sample(step=2, prompt=0, text="[bold]it\nsays", finish_reason="stop")
    said = JobEvent(seq=5, job="job-1", created_at=1.0, level="info", type="sample", message="", sample=sample)
    daemon = Daemon(events(*STORY[:-1], said, job_event(6, JobState.SUCCEEDED)), reply(job(JobState.SUCCEEDED)))
    await handle(daemon).wait(progress=progress)
    assert capsys.readouterr() == ("", shown)


def test_without_a_terminal_a_line_comes_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    lines = Lines(job(), lambda: now)
    for step, now in enumerate((110.0, 131.0, 140.0, 162.0), 1):  # noqa: B007 - the clock reads it
        lines.show(msgspec.structs.replace(job_event(step, step=step), eta=75.0))
    shown = capsys.readouterr()
    assert shown.out == "" and [line.split("  ")[:2] for line in shown.err.splitlines()] == [
        ["a@1", f"step {step}/2"] for step in (2, 4)
    ]
    assert all("  loss " in line and line.endswith(" tokens/s  1:15 left") for line in shown.err.splitlines())


def test_a_phase_of_a_document_is_said_as_it_begins_and_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    lines, event = Lines(job(), lambda: now), job_event(1)
    phases: tuple[tuple[float, Phase], ...] = (
        (101.0, "questions"),
        (102.0, "questions"),
        (131.0, "questions"),
        (132.0, "answers"),
        (133.0, "answers"),
    )
    for now, phase in phases:
        document = DocumentJob(DocumentSettings(), phase=phase)
        lines.show(msgspec.structs.replace(event, type="document", metrics=None, message=f"{now}", document=document))
    assert capsys.readouterr().err == "a@1  101.0\na@1  131.0\na@1  132.0\n"


def test_the_bar_keeps_its_items_when_a_document_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar(job()) as bar:
        for phase, count in (("evaluation", 20), ("done", 0)):
            document = DocumentJob(DocumentSettings(), phase=phase, done=count, total=count)
            bar.show(msgspec.structs.replace(job_event(1), type="document", metrics=None, document=document))
    assert capsys.readouterr().err.split()[-2:] == ["20/20", "done"]
