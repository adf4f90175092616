"""Jobs that have ended can be deleted: records, events and files go, durably; what they published stays."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from coserve.cli.app import run as command_line
from coserve.client import AsyncClient
from coserve.core.errors import JobNotFound, WrongJobState
from coserve.core.link.jobs import JobSucceeded
from coserve.core.training.jobs import JobState
from coserve.core.types import AdapterRef
from coserve.state.registry.registry import Registry
from tests.support.api_server import Api
from tests.support.records import make_job

ROWS = [{"text": "a b"}]


async def ended_job(api: Api, state: str = "succeeded", **fields: Any) -> str:
    api.engine.go_jobs.set() if state == "succeeded" else api.engine.go_jobs.clear()
    job = await api.submit(**fields)
    if state == "cancelled":
        await api.call("POST", f"/finetune/{job['id']}/cancel")
    await api.job_until(job["id"], state)
    await api.settled()
    return str(job["id"])


@pytest.mark.parametrize("state", ["succeeded", "cancelled"])
async def test_a_deleted_job_is_gone_and_its_adapter_stays(api: Api, state: str) -> None:
    id = await ended_job(api, state)
    status, gone = await api.call("DELETE", f"/finetune/{id}")
    assert (status, gone) == (200, {"id": id, "adapter": "poet", "result": "poet@1" if state == "succeeded" else None})
    for path in (f"/finetune/{id}", f"/finetune/{id}/events"):
        await api.refused(404, "job_not_found", "GET", path)
    await api.refused(404, "job_not_found", "DELETE", f"/finetune/{id}")
    assert (await api.call("GET", "/finetune"))[1]["data"] == []
    with closing(Registry(api.folder.database)) as again:  # durable
        with pytest.raises(JobNotFound):
            again.job(id)
        assert again.next_version("poet") == 2, "its version means one thing for ever"
    assert not api.folder.job(id).exists()
    status, answered = await api.call("POST", "/generate", json={"prompt": "x", "adapter": "poet"})
    assert (status, answered.get("version")) == ((200, 1) if state == "succeeded" else (404, None))


async def test_a_job_that_runs_or_that_another_waits_for_stays(api: Api) -> None:
    api.engine.go_jobs.clear()
    _, first = await api.call("POST", "/finetune", json={"adapter": "poet", "data": ROWS})
    body = {"adapter": "poet", "data": ROWS, "continue_from": "poet"}
    _, second = await api.call("POST", "/finetune", json=body)
    _, third = await api.call("POST", "/finetune", json=body)
    error = await api.refused(409, "wrong_job_state", "DELETE", f"/finetune/{first['id']}")
    assert "only a job that has ended" in error["message"]
    await api.call("POST", f"/finetune/{second['id']}/cancel")  # the third one goes on waiting for the first
    await api.refused(409, "wrong_job_state", "DELETE", f"/finetune/{third['id']}")
    api.engine.go_jobs.set()
    assert (await api.job_until(third["id"], "succeeded"))["state"] == "succeeded"
    for job in (first, second, third):
        assert (await api.call("DELETE", f"/finetune/{job['id']}"))[0] == 200


def damage(api: Api, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(api.folder.database, isolation_level=None)) as other:
        assert other.execute(statement, values).rowcount == 1


@pytest.mark.parametrize("state", ["succeeded", "queued"])
async def test_a_job_whose_record_is_damaged_can_be_deleted(api: Api, state: str) -> None:
    """Also while it waited to run: nothing can be done with it any more."""
    body, key = {"adapter": "poet", "data": ROWS}, {"Idempotency-Key": "k"}
    first = await ended_job(api)
    api.engine.go_jobs.clear()
    _, runs = await api.call("POST", "/finetune", json=body | {"adapter": "other"})
    _, job = await api.call("POST", "/finetune", json=body, headers=key)
    id = job["id"]
    _, waits = await api.call("POST", "/finetune", json=body | {"continue_from": "poet"})
    if state == "succeeded":
        api.engine.go_jobs.set()
        await api.job_until(waits["id"], "succeeded")
        await api.settled()
    damage(api, "UPDATE jobs SET record = substr(record, 1, 20) WHERE id = ?", id)
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/resume")):
        error = await api.refused(404, "job_not_found", method, f"/finetune/{id}{path}")
        assert error["message"] == f"the record of job {id!r} is damaged"
    assert (await api.call("DELETE", f"/finetune/{first}"))[0] == 200
    if state == "queued":
        await api.refused(409, "wrong_job_state", "DELETE", f"/finetune/{id}")
        await api.call("POST", f"/finetune/{waits['id']}/cancel")
    assert await api.call("DELETE", f"/finetune/{id}") == (200, {"id": id, "adapter": None, "result": None})
    await api.refused(404, "job_not_found", "DELETE", f"/finetune/{id}")
    assert not api.folder.job(id).exists()
    status, again = await api.call("POST", "/finetune", json=body, headers=key)
    assert status == 202 and again["id"] != id
    api.engine.go_jobs.set()
    for job in (runs, again):
        await api.job_until(job["id"], "succeeded")


def test_a_chain_keeps_the_jobs_that_it_passes(tmp_path: Path) -> None:
    with closing(Registry(tmp_path / "registry.sqlite3")) as registry:
        for number, after in ((1, None), (2, "job-1"), (3, "job-2")):
            registry.create_job(replace(make_job(f"job-{number}", version=number), after=after))
        registry.set_state("job-2", JobState.CANCELLED)
        with pytest.raises(WrongJobState, match="job job-3 continues from what this one leaves"):
            registry.delete_job("job-2")
        registry.set_state("job-3", JobState.CANCELLED)
        registry.delete_job("job-2")
        assert [job.spec.id for job in registry.jobs()] == ["job-3", "job-1"]


async def test_a_success_that_is_told_again_after_a_deletion_keeps_its_adapter(api: Api) -> None:
    id = await ended_job(api)
    await api.call("DELETE", f"/finetune/{id}")
    await api.hear(JobSucceeded(id=id, ref=AdapterRef("poet", 1)))
    assert (await api.call("GET", "/adapters/poet@1"))[0] == 200
    assert (api.folder.adapter(AdapterRef("poet", 1)) / "adapter_model.safetensors").is_file()


async def test_the_key_of_a_deleted_job_is_free_again(api: Api) -> None:
    made = []
    for _ in range(2):
        api.engine.go_jobs.set()
        body, headers = {"adapter": "poet", "data": ROWS}, {"Idempotency-Key": "k"}
        _, job = await api.call("POST", "/finetune", json=body, headers=headers)
        await api.job_until(job["id"], "succeeded")
        await api.call("DELETE", f"/finetune/{job['id']}")
        made.append(job["id"])
    assert made[0] != made[1]


async def test_the_sdk_and_the_command_line_delete_jobs(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = await ended_job(api), await ended_job(api, "cancelled"), await ended_job(api)
    url = api.url
    async with AsyncClient(url) as client:
        assert (await (await client.job(first)).delete()).result == "poet@1"
        with pytest.raises(JobNotFound):
            await client.job(first)

    assert await asyncio.to_thread(command_line, ["jobs", "delete", second, third, "--url", url]) == 0
    assert capsys.readouterr().out == f"deleted {second}\ndeleted {third}; poet@3 stays\n"
