"""Out of descriptors, a locked registry, a failing or a full disk: nobody's adapter is called corrupt, no job is lost
for it, and what waits holds up nobody else."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coserve.core.link import jobs
from coserve.core.types import AdapterRef, BaseSpec
from coserve.state.failpoints import armed
from coserve.state.retries import Backoff
from tests.support.api_server import Api, serve_api
from tests.support.examples import by_day
from tests.support.fake_engine import metrics, write_peft
from tests.support.real_server import serve_real
from tests.support.small_disk import fill, small_disk

JOB = {"adapter": "poet", "data": [{"text": "a b"}]}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """An API that waits a tenth of a second for a lock before it says so."""
    (tmp_path / "root").mkdir()
    patience = Backoff(first=0.05, total=0.1)
    async with serve_api(tmp_path / "data", data_root=tmp_path / "root", patience=patience) as api:
        write_peft(tmp_path / "root" / "peft", api.base)
        yield api


OPEN = [f"adapter.open={number}" for number in ("EMFILE", "ENFILE", "EIO", "EAGAIN", "ENOMEM", "ENOSPC")]
READ = "adapter.read=EIO"


@pytest.mark.parametrize("rule", by_day([*OPEN, READ], "adapter.open=EMFILE", READ))
async def test_a_finished_job_is_published_once_its_files_can_be_read(api: Api, rule: str) -> None:
    with armed(f"{rule}@1;{rule}@2;{rule}@4") as state:
        _, job = await api.call("POST", "/finetune", json=JOB)
        done = await api.job_until(job["id"], "succeeded")
        assert state.hits[rule.partition("=")[0]] > 4
    assert (done["state"], done["result"], done["error"]) == ("succeeded", "poet@1", None)
    assert (await api.call("GET", "/adapters/poet"))[0] == 200


async def test_an_end_that_an_unknown_error_keeps_from_being_written_fails_the_job(api: Api) -> None:
    with armed("adapter.read=EPERM"):
        _, job = await api.call("POST", "/finetune", json=JOB)
        done = await api.job_until(job["id"], "failed")
    assert (done["error"]["code"], "daemon's log" in done["error"]["message"]) == ("internal_error", True)
    await api.settled()
    assert api.folder.job_ids() == []


async def test_a_start_that_an_unknown_error_keeps_from_being_written_ends_the_job_in_the_engine(api: Api) -> None:
    api.engine.go_jobs.clear()
    _, job = await api.call("POST", "/finetune", json=JOB)
    await api.job_until(job["id"], "running")
    with armed("registry.before_commit=EPERM@1"):
        await api.hear(jobs.JobStarted(id=job["id"], total_steps=3))
    _, done = await api.call("GET", f"/finetune/{job['id']}")
    assert (done["state"], done["error"]["code"]) == ("failed", "internal_error")
    await api.engine.saw(jobs.CancelJob)


@pytest.mark.parametrize(("number", "status"), [("EMFILE", 503), ("ENOMEM", 503), ("EIO", 500), ("ENOSPC", 507)])
async def test_an_import_that_cannot_read_says_so_and_leaves_nothing(api: Api, number: str, status: int) -> None:
    ask = {"name": "poet", "path": "peft"}
    with armed() as state:
        assert (await api.call("POST", "/adapters", json=ask))[0] == 201
    for hit in range(1, state.hits["adapter.open"] + 1):
        with armed(f"adapter.open={number}@{hit}"):
            got, body = await api.call("POST", "/adapters", json=ask)
        assert got == status, body
        assert body["error"]["code"].startswith("storage_"), body
        assert api.folder.adapter_refs() == [AdapterRef("poet", 1)]
    assert (await api.call("POST", "/adapters", json=ask))[0] == 201


async def test_a_download_without_descriptors_is_refused_before_it_begins(api: Api) -> None:
    await api.call("POST", "/adapters", json={"name": "poet", "path": "peft"})
    for hit in (1, 2):
        with armed(f"adapter.open=EMFILE@{hit}"):
            await api.refused(503, "storage_busy", "GET", "/adapters/poet/download")


@pytest.mark.parametrize("number", ["EMFILE", "EIO"])
async def test_what_is_deleted_is_gone_though_its_files_cannot_be_removed_now(api: Api, number: str) -> None:
    await api.call("POST", "/adapters", json={"name": "poet", "path": "peft"})
    with armed(f"remove.before_rename={number}"):
        assert (await api.call("DELETE", "/adapters/poet"))[0] == 200
    await api.refused(404, "adapter_not_found", "GET", "/adapters/poet")
    assert (await api.call("POST", "/adapters", json={"name": "poet", "path": "peft"}))[1]["version"] == 2


async def test_a_busy_machine_says_when_to_come_again(api: Api) -> None:
    with armed("adapter.open=EMFILE"):
        async with api.http.post("/adapters", json={"name": "poet", "path": "peft"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1


async def test_a_locked_registry_loses_no_change_and_keeps_the_order(api: Api) -> None:
    """Locked from before the job's first step until after its end has been said."""
    written = asyncio.Event()

    def write(folder: Path, base: BaseSpec) -> None:
        write_peft(folder, base)
        written.set()

    api.engine.write_adapter = write
    api.engine.go_jobs.clear()
    _, job = await api.call("POST", "/finetune", json=JOB)
    await api.job_until(job["id"], "running")
    lock = sqlite3.connect(api.folder.database, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    api.engine.go_jobs.set()
    await written.wait()

    await api.error(503, "storage_busy", "POST", "/finetune", json=JOB)
    assert (await api.call("GET", f"/finetune/{job['id']}"))[1]["state"] == "running"
    _, health = await api.call("GET", "/health")
    assert any("job" in note and "tried again" in note for note in health["notes"]), health["notes"]

    lock.execute("ROLLBACK")
    lock.close()
    events = [event for _, event in await api.events(job["id"])]
    assert [event["metrics"]["step"] for event in events if event["metrics"]] == [1, 2, 3]
    assert [event["state"] for event in events if event["type"] == "state"] == ["queued", "running", "succeeded"]
    await api.settled()
    _, health = await api.call("GET", "/health")
    assert not any("tried again" in note for note in health["notes"])
    assert (await api.call("GET", "/finetune"))[1]["data"][0]["id"] == job["id"]


async def test_steps_that_the_disk_refuses_come_later_and_before_the_next_change(api: Api) -> None:
    api.engine.go_jobs.clear()
    id = (await api.submit())["id"]
    await api.job_until(id, "running")
    with armed("registry.before_commit=ENOSPC"):
        for step in (1, 2):
            await api.hear(jobs.JobProgress(id=id, metrics=metrics(step, 3)))
        assert (await api.job(id))["step"] == 0
    await api.hear(jobs.JobProgress(id=id, metrics=metrics(3, 3)))
    await api.hear(jobs.JobPaused(id=id))
    job = await api.job(id)
    assert (job["state"], job["step"]) == ("paused", 3)
    await api.hear(jobs.JobCancelled(id=id))
    events = [event for _, event in await api.events(id)]
    assert [event["metrics"]["step"] for event in events if event["metrics"]] == [1, 2, 3]
    states = [event["state"] for event in events if event["metrics"] or event["type"] == "state"]
    assert states == ["queued", "running", None, None, None, "paused", "cancelled"]


async def test_an_end_that_is_said_twice_keeps_its_adapter(api: Api) -> None:
    _, job = await api.call("POST", "/finetune", json=JOB)
    await api.job_until(job["id"], "succeeded")
    await api.hear(jobs.JobSucceeded(id=job["id"], ref=AdapterRef("poet", 1)))
    assert api.folder.adapter_refs() == [AdapterRef("poet", 1)]
    assert (await api.call("GET", "/adapters/poet"))[0] == 200


async def test_an_engine_without_descriptors_trains_and_serves_once_it_has_some(tmp_path: Path) -> None:
    """A job's corpus cannot be opened twice, then its adapter, of which nothing stays in memory, cannot be read
    twice."""
    async with serve_real(tmp_path / "data", host_adapter_bytes=1) as api:
        training = {"steps": 1, "batch_tokens": 16, "max_length": 16}
        for name in ("poet", "bard"):
            with armed("job.open=EMFILE@1;job.open=EIO@2;adapter.open=ENFILE@1") as state:
                _, job = await api.call("POST", "/finetune", json=JOB | {"adapter": name, "training": training})
                assert (await api.job_until(job["id"], "succeeded"))["state"] == "succeeded"
                assert state.hits["job.open"] == 3
        body = {"prompt": "Once", "adapter": "poet", "max_tokens": 2}
        with armed("adapter.open=EMFILE@1;adapter.open=EMFILE@2") as state:
            assert (await api.call("POST", "/generate", json=body))[0] == 200
            assert state.hits["adapter.open"] > 2


UNREADABLE = "adapter.read=EIO"


async def finish(api: Api) -> str:
    """A job that has trained and is published again and again."""
    job = (await api.submit())["id"]
    while not any(job in note for note in (await api.call("GET", "/health"))[1]["notes"]):
        pass
    assert (await api.job(job))["state"] == "running"
    return job


async def test_other_jobs_go_on(api: Api) -> None:
    with armed(UNREADABLE):
        job = await finish(api)
        async with asyncio.timeout(120):
            api.engine.fail_jobs = jobs.JobFailed(id="", code="non_finite_loss", message="no")
            other = await api.submit(adapter="bard")
            assert (await api.job_until(other["id"], "failed"))["error"]["code"] == "non_finite_loss"
            api.engine.fail_jobs = None
            await api.settled()
    assert (await api.job_until(job, "succeeded"))["result"] == "poet@1"
    await api.works()


async def test_the_job_s_own_messages_keep_their_order(api: Api) -> None:
    with armed(UNREADABLE):
        job = await finish(api)
        await api.hear(jobs.JobCancelled(id=job))
        assert (await api.job(job))["state"] == "running"
    assert (await api.job_until(job, "succeeded"))["result"] == "poet@1"
    assert (await api.call("GET", "/adapters/poet"))[0] == 200


async def test_the_next_engine_does_not_train_it_again(api: Api) -> None:
    with armed(UNREADABLE):
        job = await finish(api)
        async with asyncio.timeout(120):
            await api.engine.die()
            await api.start_engine()
            await api.works()
    assert (await api.job_until(job, "succeeded"))["result"] == "poet@1"
    assert not api.engine.heard(jobs.StartJob)


async def test_it_can_be_cancelled_once_its_engine_is_gone(api: Api) -> None:
    with armed(UNREADABLE):
        job = await finish(api)
        await api.engine.die()
        async with asyncio.timeout(120):
            assert (await api.call("POST", f"/finetune/{job}/cancel"))[1]["state"] == "cancelled"
    await api.start_engine()
    while api.folder.adapter_refs():
        await api.call("GET", "/health")
    await api.refused(404, "adapter_not_found", "GET", "/adapters/poet")


async def test_the_daemon_stops_and_the_next_one_publishes_it(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        async with serve_api(tmp_path / "data") as api:
            with armed(UNREADABLE):
                job = await finish(api)
                await api.engine.die()
                await api.service.close()
        async with serve_api(tmp_path / "data") as api:
            assert (await api.job_until(job, "succeeded"))["result"] == "poet@1"


ROWS = [{"text": "the cat sat on the mat"}] * 4


async def submit(api: Api, adapter: str, rank: int) -> str:
    body = {"adapter": adapter, "data": ROWS, "lora": {"r": rank}, "training": {"steps": 2, "batch_tokens": 16}}
    return str((await api.submit(**body))["id"])


async def until_it_waits(api: Api, id: str) -> dict[str, Any]:
    async with api.http.get(f"/finetune/{id}/events") as response:
        async for line in response.content:
            assert b'"state":"failed"' not in line, line
            if b"waiting for space" in line:
                break
    _, job = await api.call("GET", f"/finetune/{id}")
    found: dict[str, Any] = job
    return found


async def test_a_job_waits_for_space_and_space_can_be_made(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 24 << 20) as disk:
        async with serve_real(disk / "data") as api:
            await api.job_until(await submit(api, "old", 64), "succeeded")
            size = sum(file.stat().st_size for file in (disk / "data" / "adapters" / "old" / "1").iterdir())
            fill(disk, leave=size // 8)
            id = await submit(api, "new", 16)
            job = await until_it_waits(api, id)
            assert (job["state"], job["step"]) == ("running", 2)
            assert job["waiting"].startswith("waiting for space")
            fill(disk)
            await api.answered(200, "POST", "/generate", json={"prompt": "hello", "max_tokens": 2})
            await api.answered(200, "DELETE", "/adapters/old")
            job = await api.job_until(id, "succeeded")
            assert (job["state"], job["waiting"], job["result"]) == ("succeeded", None, "new@1")
