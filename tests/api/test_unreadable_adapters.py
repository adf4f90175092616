"""A finished job whose adapter cannot be read waits for that alone: other jobs, orders, the next engine and the
daemon's end do not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from coserve.core.link.jobs import JobCancelled, JobFailed, StartJob
from coserve.state.failpoints import armed
from tests.support.api_server import Api, serve_api

UNREADABLE = "adapter.read=EIO"


async def submit(api: Api, adapter: str) -> str:
    job = await api.answered(202, "POST", "/finetune", json={"adapter": adapter, "data": [{"text": "a b"}]})
    return str(job["id"])


async def shown(api: Api, job: str) -> dict[str, Any]:
    _, found = await api.call("GET", f"/finetune/{job}")
    return dict(found)


async def finish(api: Api) -> str:
    """A job that has trained and is published again and again."""
    job = await submit(api, "poet")
    while not any(job in note for note in (await api.call("GET", "/health"))[1]["notes"]):
        pass
    assert (await shown(api, job))["state"] == "running"
    return job


async def test_other_jobs_go_on(api: Api) -> None:
    with armed(UNREADABLE):
        job = await finish(api)
        async with asyncio.timeout(20):
            api.engine.fail_jobs = JobFailed(id="", code="non_finite_loss", message="no")
            assert (await api.job_until(await submit(api, "bard"), "failed"))["error"]["code"] == "non_finite_loss"
            api.engine.fail_jobs = None
            await api.settled()
    assert (await api.job_until(job, "succeeded"))["result"] == "poet@1"
    await api.works()


async def test_the_job_s_own_messages_keep_their_order(api: Api) -> None:
    with armed(UNREADABLE):
        job = await finish(api)
        await api.hear(JobCancelled(id=job))
        assert (await shown(api, job))["state"] == "running"
    assert (await api.job_until(job, "succeeded"))["result"] == "poet@1"
    assert (await api.call("GET", "/adapters/poet"))[0] == 200


async def test_the_next_engine_does_not_train_it_again(api: Api) -> None:
    with armed(UNREADABLE):
        job = await finish(api)
        async with asyncio.timeout(20):
            await api.engine.die()
            await api.start_engine()
            await api.works()
    assert (await api.job_until(job, "succeeded"))["result"] == "poet@1"
    assert not [message for message in api.engine.told if isinstance(message, StartJob)]


async def test_it_can_be_cancelled_once_its_engine_is_gone(api: Api) -> None:
    with armed(UNREADABLE):
        job = await finish(api)
        await api.engine.die()
        async with asyncio.timeout(20):
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
