"""Jobs of one adapter at the same time: the later one waits and goes on from what the earlier one publishes, forks or
is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from coserve.core.link.jobs import JobFailed, StartJob
from coserve.core.training.jobs import JobSpec
from coserve.core.types import AdapterRef
from coserve.state.failpoints import armed
from tests.support.api_server import Api, serve_api

MORE = {"continue_from": "poet"}


async def until_waiting_for(api: Api, job: dict[str, Any], other: dict[str, Any]) -> None:
    async with api.http.get(f"/finetune/{job['id']}/events") as response:
        async for line in response.content:
            if f"waits for job {other['id']}".encode() in line:
                break
    assert other["id"] in (await api.job(job["id"]))["waiting"]


def sent(api: Api) -> dict[str, JobSpec]:
    """The jobs that the current engine was given."""
    return {message.spec.id: message.spec for message in api.engine.heard(StartJob)}


async def test_three_jobs_of_one_adapter_continue_from_each_other(api: Api) -> None:
    api.engine.go_jobs.clear()
    first = await api.submit(lora={"r": 2})
    second = await api.submit(**MORE)
    third = await api.submit(**MORE)
    assert (second["waiting"], second["notes"], second["lora"]["r"]) == (
        f"waits for job {first['id']}, and continues from the version that it publishes",
        [],
        2,
    )
    assert (second["state"], second["continue_from"], second["version"]) == ("queued", "poet", 2)
    assert second["id"] not in sent(api)
    api.engine.go_jobs.set()
    done = await api.job_until(third["id"], "succeeded")
    assert (done["result"], done["continue_from"], done["waiting"]) == ("poet@3", "poet@2", None)
    assert [sent(api)[job["id"]].init_from for job in (first, second, third)] == [
        None,
        AdapterRef("poet", 1),
        AdapterRef("poet", 2),
    ]
    texts = [event["message"] for _, event in await api.events(second["id"])]
    assert "continues from poet@1" in texts


async def test_a_fork_a_version_and_a_new_adapter_begin_at_once_and_say_so(api: Api) -> None:
    await api.job_until((await api.submit())["id"], "succeeded")
    api.engine.go_jobs.clear()
    first = await api.submit(**MORE)
    for fields in (MORE | {"on_conflict": "fork"}, {"continue_from": "poet@1"}):
        job = await api.submit(**fields)
        assert (job["continue_from"], job["waiting"]) == ("poet@1", None)
        assert first["id"] in job["notes"][-1] and "on_conflict" in job["notes"][-1]
        assert (await api.call("POST", f"/finetune/{job['id']}/cancel"))[0] == 200
    other = await api.submit(adapter="other", continue_from="poet")
    assert other["waiting"] is None


async def test_company_is_refused_on_request(api: Api) -> None:
    api.engine.go_jobs.clear()
    first = await api.submit(on_conflict="refuse")
    for fields in ({}, MORE):
        body = await api.submit(409, on_conflict="refuse", **fields)
        assert (body["error"]["code"], body["error"]["field"]) == ("adapter_busy", "adapter")
        assert first["id"] in body["error"]["message"]
    body = await api.submit(400, on_conflict="hide")
    assert body["error"]["field"] == "on_conflict"
    body = await api.submit(400, lora={"r": 8}, **MORE)
    assert body["error"]["field"] == "lora"


async def test_a_job_whose_predecessor_publishes_nothing_goes_on_from_what_there_is(api: Api) -> None:
    await api.job_until((await api.submit())["id"], "succeeded")
    api.engine.go_jobs.clear()
    first, second = await api.submit(**MORE), await api.submit(**MORE)
    third = await api.submit(**MORE)
    assert (await api.call("POST", f"/finetune/{second['id']}/cancel"))[1]["state"] == "cancelled"
    await until_waiting_for(api, third, first)
    await api.hear(JobFailed(id=first["id"], code="non_finite_loss", message="no"))
    api.engine.go_jobs.set()
    done = await api.job_until(third["id"], "succeeded")
    assert (done["result"], done["continue_from"]) == ("poet@4", "poet@1")
    texts = [event["message"] for _, event in await api.events(third["id"])]
    assert f"job {first['id']} is failed and published nothing: continues from poet@1" in texts


async def two_jobs(api: Api) -> tuple[dict[str, Any], dict[str, Any]]:
    """The second one waits for the first one, and goes on from poet@1 if that one is cancelled."""
    await api.job_until((await api.submit())["id"], "succeeded")
    api.engine.go_jobs.clear()
    return await api.submit(**MORE), await api.submit(**MORE)


async def cancel_until_its_source_is_tried_again(api: Api, first: dict[str, Any], second: dict[str, Any]) -> None:
    await api.call("POST", f"/finetune/{first['id']}/cancel")
    while not any(second["id"] in note for note in (await api.call("GET", "/health"))[1]["notes"]):
        pass


async def test_a_job_whose_source_cannot_be_read_keeps_nobody_else_waiting(api: Api) -> None:
    first, second = await two_jobs(api)
    with armed("adapter.read=EIO"):
        await cancel_until_its_source_is_tried_again(api, first, second)
        async with asyncio.timeout(120):
            other = await api.submit(adapter="other")
            for order, state in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled")):
                _, found = await api.call("POST", f"/finetune/{other['id']}/{order}")
                assert found["state"] == state
            await api.call("POST", f"/finetune/{second['id']}/pause")
            await api.engine.die()
            await api.start_engine()
    api.engine.go_jobs.set()
    await api.call("POST", f"/finetune/{second['id']}/resume")
    assert (await api.job_until(second["id"], "succeeded"))["continue_from"] == "poet@1"


async def test_the_version_that_a_job_waits_to_go_on_from_is_not_deleted(api: Api) -> None:
    api.engine.go_jobs.clear()
    _, second = await api.submit(), await api.submit(**MORE)
    with armed(";".join(f"adapter.read=EIO@{hit}" for hit in (3, 4, 5))) as state:  # the first two publish poet@1
        api.engine.go_jobs.set()
        while state.hits["adapter.read"] < 3:
            await api.call("GET", "/health")
        await api.refused(409, "adapter_busy", "DELETE", "/adapters/poet@1")
        assert (await api.job_until(second["id"], "succeeded"))["continue_from"] == "poet@1"
    assert (await api.call("DELETE", "/adapters/poet@1"))[0] == 200


async def test_a_version_that_is_deleted_while_it_is_read_is_not_continued(api: Api) -> None:
    await api.job_until((await api.submit())["id"], "succeeded")
    first, second = await two_jobs(api)
    with armed("adapter.read=delay:0.5s") as state:
        await api.call("POST", f"/finetune/{first['id']}/cancel")
        while not state.hits["adapter.read"]:
            await api.call("GET", "/health")
        assert (await api.call("DELETE", "/adapters/poet@2"))[0] == 200
    api.engine.go_jobs.set()
    assert (await api.job_until(second["id"], "succeeded"))["continue_from"] == "poet@1"


async def test_a_daemon_stops_while_a_source_cannot_be_read(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        async with serve_api(tmp_path / "data") as api:
            first, second = await two_jobs(api)
            with armed("adapter.read=EIO"):
                await cancel_until_its_source_is_tried_again(api, first, second)
                await api.engine.die()
                await api.service.close()
        async with serve_api(tmp_path / "data") as api:
            assert (await api.job_until(second["id"], "succeeded"))["continue_from"] == "poet@1"


async def test_without_any_version_the_waiting_job_fails_and_says_why(api: Api) -> None:
    api.engine.go_jobs.clear()
    first, second = await api.submit(), await api.submit(**MORE)
    await api.call("POST", f"/finetune/{first['id']}/cancel")
    done = await api.job_until(second["id"], "failed")
    assert done["error"]["code"] == "adapter_not_found"
    assert done["error"]["message"].endswith(f"what job {first['id']} publishes, which is cancelled: no adapter 'poet'")
    await api.settled()
    assert not api.folder.job(second["id"]).exists()


async def test_a_waiting_job_is_paused_and_resumed(api: Api) -> None:
    api.engine.go_jobs.clear()
    await api.submit()
    second = await api.submit(**MORE)
    _, paused = await api.call("POST", f"/finetune/{second['id']}/pause")
    assert (paused["state"], "waits for job" in paused["waiting"]) == ("paused", True)
    _, resumed = await api.call("POST", f"/finetune/{second['id']}/resume")
    assert (resumed["state"], "waits for job" in resumed["waiting"]) == ("queued", True)
    assert second["id"] not in sent(api)
    await api.call("POST", f"/finetune/{second['id']}/pause")
    api.engine.go_jobs.set()
    await api.engine.saw(StartJob, 2)  # paused: the engine keeps it for later
    _, resumed = await api.call("POST", f"/finetune/{second['id']}/resume")
    assert (await api.job_until(second["id"], "succeeded"))["continue_from"] == "poet@1"


async def test_a_job_that_waits_for_a_paused_one_says_so(api: Api) -> None:
    api.engine.go_jobs.clear()
    first, second = await api.submit(), await api.submit(**MORE)
    assert "paused" not in second["waiting"]
    await api.call("POST", f"/finetune/{first['id']}/pause")
    _, listed = await api.call("GET", "/finetune")
    for found in (await api.job(second["id"]), listed["data"][0]):
        assert f"waits for job {first['id']}, which is paused" in found["waiting"]
    assert listed["data"][1]["waiting"] is None
    await api.call("POST", f"/finetune/{first['id']}/resume")
    assert "paused" not in (await api.job(second["id"]))["waiting"]


async def test_a_restarted_daemon_goes_on_waiting_or_goes_on(tmp_path: Path) -> None:
    async with serve_api(tmp_path / "data") as api:
        api.engine.go_jobs.clear()
        first, second = await api.submit(), await api.submit(**MORE)
    async with serve_api(tmp_path / "data", engine=False) as api:
        assert first["id"] in (await api.job(second["id"]))["waiting"]
        await api.start_engine()
        done = await api.job_until(second["id"], "succeeded")
        assert (done["result"], done["continue_from"]) == ("poet@2", "poet@1")
        assert sent(api)[second["id"]].init_from == AdapterRef("poet", 1)
    async with serve_api(tmp_path / "data") as api:
        api.engine.go_jobs.clear()
        third, fourth = await api.submit(**MORE), await api.submit(**MORE)
        await api.engine.die()
        await api.call("POST", f"/finetune/{third['id']}/cancel")  # without an engine
        await api.start_engine()
        assert (await api.job_until(fourth["id"], "succeeded"))["continue_from"] == "poet@2"
        assert sent(api).keys() == {fourth["id"]}
