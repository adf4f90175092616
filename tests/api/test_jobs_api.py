"""Jobs over HTTP: accepted durably, steered, followed, and given to the next engine."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coserve.api.jobs.idempotency import IdempotencyKeys
from coserve.api.jobs.submission import Submission
from coserve.core.errors import QueueFull
from coserve.core.link.engine import DropAdapter
from coserve.core.link.jobs import CancelJob, JobFailed, JobPaused, JobProgress, JobWaiting, PauseJob, StartJob
from coserve.core.types import AdapterRef, BaseSpec
from coserve.data.corpus.tokenized import Corpus
from coserve.state import durable
from coserve.state.durable import remove_dir
from coserve.state.failpoints import armed
from tests.support.api_server import REPLY, Api, read_events, serve_api
from tests.support.fake_engine import write_peft
from tests.support.records import make_metrics

ROWS = [{"text": "one two three"}, {"prompt": "a", "completion": "b"}]


async def submit(api: Api, **fields: Any) -> dict[str, Any]:
    headers = fields.pop("headers", {})
    request = {"adapter": "poet", "data": ROWS, "training": {"steps": 3}, "lora": {"r": 2}} | fields
    return await api.answered(202, "POST", "/finetune", json=request, headers=headers)


async def running(api: Api) -> dict[str, Any]:
    """A job that runs until `go_jobs` is set."""
    api.engine.go_jobs.clear()
    job = await submit(api)
    await api.job_until(job["id"], "running")
    return job


async def test_a_job_from_rows_to_an_adapter_that_serves(api: Api) -> None:
    api.engine.go_jobs.clear()
    job = await submit(api, metadata={"who": "me"})
    assert (job["adapter"], job["version"], job["rows"], job["metadata"]) == ("poet", 1, 2, {"who": "me"})
    assert job["total_steps"] == 3
    corpus = Corpus.load(api.folder.corpus(job["id"]))
    assert (corpus.rows, len(corpus.tokens)) == (2, job["tokens"])
    api.engine.go_jobs.set()
    done = await api.job_until(job["id"], "succeeded")
    assert (done["state"], done["result"], done["progress"], done["loss"]) == ("succeeded", "poet@1", 1.0, 1.0)
    assert done["trained_tokens"] == 30
    assert done["started_at"] <= done["finished_at"]
    await api.settled()
    assert not api.folder.job(job["id"]).exists()
    status, body = await api.call("POST", "/generate", json={"prompt": "x", "adapter": done["result"]})
    assert (status, body["adapter"], body["version"], body["choices"][0]["text"]) == (200, "poet", 1, REPLY)
    _, adapter = await api.call("GET", "/adapters/poet")
    assert (adapter["source"], adapter["rank"], adapter["versions"]) == (f"job:{job['id']}", 2, [1])


async def test_no_job_waits_for_the_files_of_another_to_be_deleted(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of a large adapter are gigabytes."""
    may_delete = threading.Event()

    def slow(path: Path) -> None:
        may_delete.wait(60)
        remove_dir(path)

    monkeypatch.setattr(durable, "remove_dir", slow)
    first, second = await submit(api, adapter="one"), await submit(api, adapter="two")
    for job in (first, second):
        await api.job_until(job["id"], "succeeded")
        assert (await api.events(job["id"]))[-1][1]["state"] == "succeeded"
        assert api.folder.job(job["id"]).exists()
    may_delete.set()
    await api.settled()
    assert not api.folder.job(first["id"]).exists() and not api.folder.job(second["id"]).exists()


async def test_events_from_the_first_to_the_last_and_again_from_the_middle(api: Api) -> None:
    job = await submit(api)
    story = await api.events(job["id"])
    assert [seq for seq, _ in story] == list(range(1, len(story) + 1))
    kinds = [event["type"] for _, event in story]
    assert kinds == ["state", "state", "metrics", "metrics", "metrics", "checkpoint", "state"]
    assert [event["state"] for _, event in story if event["type"] == "state"] == ["queued", "running", "succeeded"]
    assert [event["metrics"]["loss"] for _, event in story if event["metrics"]] == [3.0, 1.5, 1.0]
    assert await api.events(job["id"], headers={"Last-Event-ID": "4"}) == story[4:]
    assert await api.events(job["id"], params={"after": "7"}) == []


@pytest.mark.parametrize("damaged", ["substr(record, 1, 20)", "(SELECT record FROM events WHERE seq = 2)"])
async def test_a_damaged_event_is_told_in_its_place(api: Api, damaged: str) -> None:
    job = await submit(api)
    story = await api.events(job["id"])
    with closing(sqlite3.connect(api.folder.database, isolation_level=None)) as other:
        other.execute(f"UPDATE events SET record = {damaged} WHERE seq = 3")
    told = await api.events(job["id"])
    assert told[:2] + told[3:] == story[:2] + story[3:]
    seq, event = told[2]
    assert (seq, event["type"], event["level"], event["message"]) == (3, "message", "error", "event 3 is damaged")
    events = (await api.call("GET", f"/v1/fine_tuning/jobs/{job['id']}/events"))[1]["data"]
    assert [event["message"] for event in events if event["level"] == "error"] == ["event 3 is damaged"]
    assert (await api.call("GET", f"/v1/fine_tuning/jobs/{job['id']}"))[0] == 200


def step(job: str, number: int) -> JobProgress:
    return JobProgress(id=job, metrics=make_metrics(number, 40))


async def test_steps_that_a_full_disk_refuses_are_told_once_and_written_later(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    api.engine.go_jobs.clear()
    job = (await submit(api))["id"]
    await api.job_until(job, "running")
    with armed("registry.before_commit=ENOSPC"):
        for number in range(1, 30):
            await api.hear(step(job, number))
        told: list[str] = []
        for _ in range(6000):
            _, health = await api.call("GET", "/health")
            told = [record.getMessage() for record in caplog.records if "disk is full" in record.getMessage()]
            noted = [note for note in health["notes"] if "the disk is full" in note]
            if told and noted:  # the answer may be from just before the first failure
                break
            await asyncio.sleep(0.01)
    assert len(told) == 1, told
    assert noted, health["notes"]
    await api.hear(JobWaiting(id=job, message="waiting for space"))  # after its last step
    _, now = await api.call("GET", f"/finetune/{job}")
    assert (now["step"], now["waiting"]) == (29, "waiting for space")
    api.engine.go_jobs.set()
    story = await api.events(job)
    steps = [event["metrics"]["step"] for _, event in story if event["metrics"]]
    assert steps[:29] == list(range(1, 30))


async def test_a_full_disk_costs_neither_progress_nor_state(api: Api) -> None:
    with armed("registry.before_commit=ENOSPC@3;registry.before_commit=ENOSPC@6"):
        job = await submit(api)
        done = await api.job_until(job["id"], "succeeded")
    assert done["state"] == "succeeded"
    story = await api.events(job["id"])
    assert [event["metrics"]["loss"] for _, event in story if event["metrics"]] == [3.0, 1.5, 1.0]


async def test_the_same_key_gives_the_same_job(api: Api) -> None:
    api.engine.go_jobs.clear()
    first = await submit(api, headers={"Idempotency-Key": "once"})
    again = await submit(api, headers={"Idempotency-Key": "once"})
    assert again["id"] == first["id"]
    assert api.folder.job_ids() == [first["id"]]
    for index in range(2):
        await submit(api, adapter=f"other{index}")
    assert (await submit(api, headers={"Idempotency-Key": "once"}))["id"] == first["id"]  # also when the line is full
    await api.refused(429, "queue_full", "POST", "/finetune", json={"adapter": "poet", "data": ROWS})
    await api.call("POST", f"/finetune/{first['id']}/cancel")
    other = await submit(api, headers={"Idempotency-Key": "twice"})
    assert other["version"] == 2
    assert len(await api.engine.saw(StartJob, 4)) == 4


@dataclass
class HeldSubmission:
    """Requests whose jobs are being prepared wait for `go`."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    count: int = 0


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldSubmission:
    found, prepare = HeldSubmission(), Submission.prepare

    async def hold(*arguments: Any) -> Any:
        found.count += 1
        found.entered.release()
        await found.go.wait()
        return await prepare(*arguments)

    monkeypatch.setattr(Submission, "prepare", hold)
    return found


async def test_a_request_that_is_repeated_while_it_is_handled_gets_the_first_ones_job(
    api: Api, held: HeldSubmission
) -> None:
    api.engine.go_jobs.clear()
    fields = {"headers": {"Idempotency-Key": "once"}, "on_conflict": "refuse"}
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(submit(api, **fields))
        await held.entered.acquire()
        second = tasks.create_task(submit(api, **fields))
        await api.works()
        held.go.set()
    assert first.result()["id"] == second.result()["id"]
    assert (held.count, api.folder.job_ids()) == (1, [first.result()["id"]])


async def test_a_repeated_request_is_handled_itself_once_the_first_ones_client_has_left(
    api: Api, held: HeldSubmission
) -> None:
    api.engine.go_jobs.clear()
    fields = {"headers": {"Idempotency-Key": "once"}}
    first = asyncio.create_task(submit(api, **fields))
    await held.entered.acquire()
    second = asyncio.create_task(submit(api, **fields))
    await api.works()
    first.cancel()
    await held.entered.acquire()
    held.go.set()
    job = await second
    assert (held.count, api.folder.job_ids()) == (2, [job["id"]])


async def test_a_request_does_not_wait_for_ever_for_the_one_with_its_key() -> None:
    keys = IdempotencyKeys(patience=0.0)
    async with keys.alone("once"):
        with pytest.raises(QueueFull, match="once"):
            async with keys.alone("once"):
                pass
        async with keys.alone("twice"), keys.alone(None), keys.alone(None):
            pass
    async with keys.alone("once"):
        pass


async def test_pause_resume_cancel(api: Api) -> None:
    job = await running(api)
    path = f"/finetune/{job['id']}"
    status, paused = await api.call("POST", f"{path}/pause")
    assert (status, paused["state"]) == (200, "paused")
    assert (await api.refused(409, "wrong_job_state", "POST", f"{path}/pause"))["field"] == "id"
    resumed = await api.answered(200, "POST", f"{path}/resume")
    assert resumed["state"] in ("queued", "running")
    status, cancelled = await api.call("POST", f"{path}/cancel")
    assert (status, cancelled["state"]) == (200, "cancelled")
    for order in ("pause", "resume", "cancel"):
        await api.refused(409, "wrong_job_state", "POST", f"{path}/{order}")
        await api.refused(404, "job_not_found", "POST", f"/finetune/job-none/{order}")
    await api.settled()
    assert not api.folder.job(job["id"]).exists()


async def test_lists_page_by_page_newest_first_and_the_line(api: Api) -> None:
    api.engine.go_jobs.clear()
    ids = [(await submit(api, adapter=name))["id"] for name in "abc"]
    status, page = await api.call("GET", "/finetune", params={"limit": "2"})
    assert (status, [job["id"] for job in page["data"]], page["has_more"]) == (200, [ids[2], ids[1]], True)
    _, page = await api.call("GET", "/finetune", params={"after": ids[1]})
    assert ([job["id"] for job in page["data"]], page["has_more"]) == ([ids[0]], False)
    found = await api.refused(429, "queue_full", "POST", "/finetune", json={"adapter": "d", "data": ROWS})
    assert found["message"] == "3 jobs wait, run or are paused; the daemon takes 3"
    await api.call("POST", f"/finetune/{ids[0]}/pause")
    found = await api.refused(429, "queue_full", "POST", "/finetune", json={"adapter": "d", "data": ROWS})
    assert "(paused: 1; resume or cancel them)" in found["message"]
    await api.engine.die()
    async with api.http.get("/health") as response:
        assert response.status == 503
    await api.start_engine()


async def test_jobs_without_an_engine_wait_and_obey(api: Api) -> None:
    await api.engine.die()
    assert (await api.call("GET", "/health"))[0] == 503
    first, second, third = [await submit(api, adapter=name) for name in "abc"]
    assert (first["state"], first["queue_position"], third["queue_position"]) == ("queued", 0, 2)
    assert (await api.call("POST", f"/finetune/{first['id']}/pause"))[1]["state"] == "paused"
    assert (await api.call("POST", f"/finetune/{second['id']}/cancel"))[1]["state"] == "cancelled"
    await api.start_engine()
    told = await api.engine.saw(StartJob, 2)
    assert [(m.spec.id, m.paused) for m in told] == [(first["id"], True), (third["id"], False)]
    assert (await api.job_until(third["id"], "succeeded"))["result"] == "c@1"
    assert (await api.call("POST", f"/finetune/{first['id']}/resume"))[0] == 200
    assert (await api.job_until(first["id"], "succeeded"))["result"] == "a@1"


@pytest.mark.parametrize(("order", "state"), [("pause", "paused"), ("cancel", "cancelled")])
async def test_an_order_does_not_wait_for_the_next_engine(api: Api, order: str, state: str) -> None:
    job = await running(api)
    api.engine.obeys = False
    asked = asyncio.create_task(api.call("POST", f"/finetune/{job['id']}/{order}"))
    await api.engine.saw(PauseJob if order == "pause" else CancelJob)
    await api.engine.die()
    status, answer = await asyncio.wait_for(asked, 20)  # less than the time that an order waits for an engine
    assert (status, answer["state"]) == (200, state)
    await api.start_engine()
    await api.works()
    told = [message.paused for message in api.engine.heard(StartJob)]
    assert told == ([True] if order == "pause" else [])


async def test_a_job_that_fails_says_why(api: Api) -> None:
    api.engine.fail_jobs = JobFailed(id="", code="non_finite_loss", message="the loss is nan at step 2")
    job = await submit(api)
    failed = await api.job_until(job["id"], "failed")
    assert failed["error"] == {"code": "non_finite_loss", "message": "the loss is nan at step 2", "field": None}
    await api.settled()
    assert api.folder.job_ids() == []
    await api.refused(404, "adapter_not_found", "POST", "/generate", json={"prompt": "x", "adapter": "poet"})


async def test_a_published_adapter_that_cannot_be_read_fails_the_job(api: Api) -> None:
    def write_half(folder: Path, base: BaseSpec) -> None:
        write_peft(folder, base)
        (folder / "adapter_model.safetensors").write_bytes(b"x" * 20)

    api.engine.write_adapter = write_half
    job = await submit(api)
    failed = await api.job_until(job["id"], "failed")
    assert failed["error"]["code"] == "corrupt_adapter"
    await api.settled()
    assert not api.folder.adapter(AdapterRef("poet", 1)).exists(), "no files without a row"
    await api.engine.saw(DropAdapter)
    await api.refused(404, "adapter_not_found", "POST", "/generate", json={"prompt": "x", "adapter": "poet"})


async def test_a_job_continues_an_adapter_with_its_shape(api: Api) -> None:
    job = await submit(api)
    await api.job_until(job["id"], "succeeded")
    status, more = await api.call("POST", "/finetune", json={"adapter": "poet", "continue_from": "poet", "data": ROWS})
    assert (status, more["continue_from"], more["version"], more["lora"]["r"]) == (202, "poet@1", 2, 2)
    request = {"adapter": "poet", "continue_from": "poet", "data": ROWS, "lora": {"r": 8}}
    error = await api.refused(400, "invalid_request", "POST", "/finetune", json=request)
    assert (error["field"], error["message"]) == ("lora", "expected no lora settings: continue_from has its own")


async def test_another_base_leaves_a_job_alone(tmp_path: Path) -> None:
    async with serve_api(tmp_path / "data") as api:
        api.engine.go_jobs.clear()
        job = await submit(api)
    async with serve_api(tmp_path / "data", engine=False) as api:
        api.base = msgspec.structs.replace(api.base, fingerprint="0" * 16)
        await api.start_engine()
        await api.works()
        assert not api.engine.heard(StartJob)
        _, shown = await api.call("GET", f"/finetune/{job['id']}")
        assert (shown["state"], shown["waiting"]) == ("queued", "needs another base; this daemon has fake")


async def test_a_full_disk_does_not_keep_the_next_engine_out(api: Api) -> None:
    job = await running(api)
    await api.engine.die()
    with armed("registry.before_commit=ENOSPC@1;registry.before_commit=ENOSPC@2"):
        await api.start_engine()
    assert (await api.job_until(job["id"], "succeeded"))["result"] == "poet@1"


async def test_the_end_of_the_daemon_ends_streams_of_events(tmp_path: Path) -> None:
    async with serve_api(tmp_path / "data") as api:

        async def text(path: str) -> str:
            async with api.http.get(path) as response:
                return await response.text()

        api.engine.go_jobs.clear()
        job = await submit(api)
        follow = asyncio.create_task(text(f"/finetune/{job['id']}/events"))
        await api.job_until(job["id"], "running")
    *story, last = read_events(await follow)
    assert [event["data"]["state"] for event in story] == ["queued", "running"]
    assert (last["event"], last["data"]["error"]["code"]) == ("error", "engine_unavailable")


async def test_a_pause_that_nobody_waited_for_does_not_come_back(api: Api) -> None:
    job = await running(api)
    path = f"/finetune/{job['id']}"
    api.engine.obeys = False
    pause = asyncio.create_task(api.call("POST", f"{path}/pause"))
    (asked,) = await api.engine.saw(PauseJob)
    pause.cancel()
    api.engine.obeys = True
    api.engine.handle(asked)
    await api.job_until(job["id"], "paused")
    await api.call("POST", f"{path}/resume")
    await api.job_until(job["id"], "running", times=2)
    await api.engine.die()
    await api.start_engine()
    assert (await api.job_until(job["id"], "succeeded"))["result"] == "poet@1"


async def test_a_pause_that_is_obeyed_does_not_forget_a_later_cancel(api: Api) -> None:
    job = await running(api)
    path = f"/finetune/{job['id']}"
    api.engine.obeys = False
    pause = asyncio.create_task(api.call("POST", f"{path}/pause"))
    await api.engine.saw(PauseJob)
    cancel = asyncio.create_task(api.call("POST", f"{path}/cancel"))
    await api.engine.saw(CancelJob)
    await api.hear(JobPaused(id=job["id"]))
    assert (await pause)[1]["state"] == "paused"
    await api.engine.die()
    await api.start_engine()
    _, now = await api.call("GET", path)
    assert now["state"] == "cancelled"
    assert (await cancel)[1]["state"] == "cancelled"
    assert not api.engine.heard(StartJob)
