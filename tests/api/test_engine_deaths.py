"""Jobs whose engine dies again and again: they go on with the next one, or are paused with their files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coserve.api.jobs.manager import MAX_DEATHS
from coserve.client import AsyncClient
from coserve.core.errors import EngineCrashed
from coserve.core.link.jobs import JobProgress, StartJob
from coserve.core.training.jobs import JobState
from tests.support.api_server import Api
from tests.support.fake_engine import metrics

JOB = {"adapter": "poet", "data": [{"text": "a b"}]}


@pytest.fixture
async def job(api: Api) -> str:
    """It has started and goes no further."""
    api.engine.go_jobs.clear()
    _, job = await api.call("POST", "/finetune", json=JOB)
    await api.job_until(job["id"], "running")
    return str(job["id"])


async def another_engine(api: Api) -> None:
    await api.engine.die()
    await api.start_engine()
    api.engine.go_jobs.clear()


async def trains_until(api: Api, job: str, step: int) -> None:
    await api.hear(JobProgress(id=job, metrics=metrics(step, 100)))


async def die_until_it_is_paused(api: Api, job: str, *, before: int = 0) -> None:
    for death in range(MAX_DEATHS):
        await api.job_until(job, "running", times=before + death + 1)
        await another_engine(api)
    assert (await api.job(job))["state"] == "paused"


async def test_a_job_goes_on_with_the_next_engine_but_not_for_ever(api: Api, job: str) -> None:
    await die_until_it_is_paused(api, job)
    paused = await api.job(job)
    assert paused["error"]["code"] == "engine_crashed"
    assert "died 3 times" in paused["error"]["message"] and "resume" in paused["error"]["message"]
    assert api.folder.corpus(job).is_file()
    (told,) = await api.engine.saw(StartJob)
    assert told.paused
    await api.works()

    await api.call("POST", f"/finetune/{job}/resume")
    await die_until_it_is_paused(api, job, before=MAX_DEATHS)  # counted anew

    await api.call("POST", f"/finetune/{job}/resume")
    api.engine.go_jobs.set()
    ended = await api.job_until(job, "succeeded")
    assert ended["result"] == "poet@1" and ended["error"] is None


async def test_the_sdk_waits_no_longer_for_a_job_that_the_daemon_paused(api: Api, job: str) -> None:
    async with AsyncClient(api.url) as client:
        handle = await client.job(job)
        waits = asyncio.create_task(handle.wait())
        await die_until_it_is_paused(api, job)
        with pytest.raises(EngineCrashed, match="resume it"):
            await waits
        with pytest.raises(EngineCrashed):
            await handle.wait()
        assert (await handle.wait(check=False)).state is JobState.PAUSED

        await handle.resume()
        await handle.pause()  # by somebody, so it is waited for, although its events show the daemon's pause, too
        with pytest.raises(TimeoutError):
            await handle.wait(timeout=0.5)
        api.engine.go_jobs.set()
        await handle.resume()
        assert (await handle.wait()).result == "poet@1"


@pytest.mark.parametrize(("steps", "goes_on"), [(range(1, 2 * MAX_DEATHS + 1), True), ((5, 5, 4), False)])
async def test_a_job_goes_on_as_long_as_it_gets_further_each_time(
    api: Api, job: str, steps: Sequence[int], goes_on: bool
) -> None:
    for death, step in enumerate(steps):
        await api.job_until(job, "running", times=death + 1)
        await trains_until(api, job, step)
        await another_engine(api)
    assert (await api.job(job))["state"] in (("queued", "running") if goes_on else ("paused",))
