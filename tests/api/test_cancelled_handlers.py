"""Whoever leaves, and whenever: files and rows agree, nothing is half done, nothing stays taken, and the next one
works."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from coserve.core.link.engine import PrefetchAdapter
from coserve.core.link.jobs import CancelJob, StartJob
from coserve.core.training.jobs import JobState
from coserve.core.types import AdapterRef
from coserve.state.recover import recover
from coserve.state.registry.registry import Registry
from tests.support.api_server import Api, Call, attempt, form, serve_api
from tests.support.cutting import Cutter
from tests.support.examples import TURN, by_day
from tests.support.fake_engine import write_peft

MOST_AWAITS = 80
ROWS = [{"text": "a b"}]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    root = tmp_path / "root"
    async with serve_api(tmp_path / "data", data_root=root, max_jobs=1000, cutter=Cutter()) as api:
        for rank in (1, 2):
            write_peft(root / f"rank{rank}", api.base, rank=rank)
        yield api


@pytest.fixture(params=[pytest.param("at once", marks=pytest.mark.slow), "late"])
def late(request: pytest.FixtureRequest) -> bool:
    """Whether threads have done what the handler waits for when it is cancelled."""
    return bool(request.param == "late")


async def at_every_await(
    api: Api,
    late: bool,
    call: Callable[[int], Awaitable[Call]],
    check: Callable[[int, int | None], Awaitable[None]],
    every: int = 2,
) -> None:
    """Cut the call at every second await, or fewer, until it ends uncut; on other days at the others. `check` gets the
    round and the status."""
    first = 1 + (TURN + late) % every
    for at in range(first, MOST_AWAITS, every):
        status, cut = await attempt(api, await call(at), at, late)
        agree(api)
        await check(at, status)
        if not cut:
            assert status is not None
            assert status < 300, status
            assert at > first, "nothing was cut"
            return
    raise AssertionError("the call never ended")


def agree(api: Api) -> None:
    """Rows and files are one to one and the same; nothing is half written; no upload is left."""
    registry = Registry(api.folder.database)
    try:
        refs = registry.adapter_refs()
        assert refs == api.folder.adapter_refs()
        for ref in refs:
            content = (api.folder.adapter(ref) / WEIGHTS).read_bytes()
            assert hashlib.sha256(content).hexdigest() == registry.adapter(ref.id, ref.version).sha256
        jobs = registry.jobs(limit=-1)
        assert set(api.folder.job_ids()) == {job.spec.id for job in jobs if not job.state.terminal}
        told = [message.spec.id for message in api.engine.heard(StartJob)]
        assert sorted(told) == sorted(job.spec.id for job in jobs), "the engine knows each job, once"
    finally:
        registry.close()
    assert list(api.folder.staging.iterdir()) == []
    hidden = [path for folder in (api.folder.adapters, api.folder.jobs) for path in folder.rglob(".*")]
    assert hidden == []


def open_files() -> list[Path]:
    """Of this process."""
    return [link.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()]


async def bring_in(api: Api, name: str, rank: int = 1) -> AdapterRef:
    adapter = await api.answered(201, "POST", "/adapters", json={"name": name, "path": f"rank{rank}"})
    assert adapter["rank"] == rank
    return AdapterRef(name, adapter["version"])


def upload(settings: dict[str, object], *files: Path) -> dict[str, object]:
    return {"data": form(settings, *files)}


@pytest.mark.slow
async def test_conversions_with_a_job(api: Api, late: bool) -> None:
    """The adapter and the job that distills it are both there, or neither."""
    await bring_in(api, "poet", rank=2)

    async def call(at: int) -> Call:
        body = {"bd_blocks": 1, "name": f"new{at}", "distill": {"data": ROWS}}
        return "POST", "/adapters/poet/convert", {"json": body}

    async def check(at: int, status: int | None) -> None:
        made = (await api.call("GET", f"/adapters/new{at}"))[0] == 200
        _, jobs = await api.call("GET", "/finetune", params={"limit": "100"})
        assert made == any(job["adapter"] == f"new{at}" for job in jobs["data"])
        assert made or status is None

    await at_every_await(api, late, call, check, every=6)  # processes convert and prepare


@pytest.mark.parametrize("how", by_day(["path", "upload"], "upload"))
async def test_imports(api: Api, late: bool, how: str) -> None:
    """The one that comes next gets its own files, whatever became of the first."""
    root = api.root

    async def call(at: int) -> Call:
        if how == "path":
            return "POST", "/adapters", {"json": {"name": "poet", "path": "rank2"}}
        return "POST", "/adapters", upload({"name": "poet"}, *sorted((root / "rank2").iterdir()))

    async def check(at: int, status: int | None) -> None:
        ref = await bring_in(api, "poet", rank=1)
        assert (await api.call("GET", f"/adapters/{ref}"))[1]["rank"] == 1
        agree(api)

    await at_every_await(api, late, call, check)


async def test_loads_in_place(api: Api, late: bool) -> None:
    """One loaded version is there, and the last one has the pin."""
    load = {"lora_name": "poet", "lora_path": "rank2", "load_inplace": True}
    async with api.http.post("/v1/load_lora_adapter", json=load) as response:
        assert response.status == 200
    await api.answered(200, "PATCH", "/adapters/poet", json={"pinned": True})

    async def call(at: int) -> Call:
        return "POST", "/v1/load_lora_adapter", {"json": load}

    async def check(at: int, status: int | None) -> None:
        _, shown = await api.call("GET", "/adapters/poet")
        assert (len(shown["versions"]), shown["pinned"]) == (1, True)

    await at_every_await(api, late, call, check, every=1)


@pytest.mark.parametrize("how", by_day(["json", "upload"], "json"))
async def test_submissions(api: Api, late: bool, how: str, tmp_path: Path) -> None:
    """A job is there and the engine knows of it, or there is none: its key then makes one, and only one."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    api.engine.go_jobs.clear()

    async def call(at: int) -> Call:
        body: dict[str, object] = {"adapter": "poet"}
        data = {"json": body | {"data": ROWS}} if how == "json" else upload(body, tmp_path / "rows.jsonl")
        return "POST", "/finetune", data | {"headers": {"Idempotency-Key": f"key-{at}"}}

    async def check(at: int, status: int | None) -> None:
        method, path, arguments = await call(at)
        again = [await api.call(method, path, **arguments) for _ in range(2 if how == "json" else 1)]
        assert {code for code, _ in again} == {202}
        _, listed = await api.call("GET", "/finetune", params={"limit": "100"})
        assert len(listed["data"]) == (at + 1) // 2

    await at_every_await(api, late, call, check)


@pytest.mark.parametrize("what", ["poet", "poet@1"])
async def test_deletions(api: Api, late: bool, what: str) -> None:
    async def call(at: int) -> Call:
        await api.call("DELETE", "/adapters/poet")
        ref = await bring_in(api, "poet")
        return "DELETE", f"/adapters/{ref if '@' in what else 'poet'}", {}

    async def check(at: int, status: int | None) -> None:
        await bring_in(api, "poet", rank=2)

    await at_every_await(api, late, call, check)


async def test_rollbacks(api: Api, late: bool) -> None:
    refs = [await bring_in(api, "poet", rank) for rank in (1, 2)]

    async def call(at: int) -> Call:
        return "POST", "/adapters/poet/rollback", {"json": {"version": refs[at // 2 % 2].version}}

    async def check(at: int, status: int | None) -> None:
        _, shown = await api.call("GET", "/adapters/poet")
        assert shown["version"] == refs[at // 2 % 2].version or status is None

    await at_every_await(api, late, call, check)


async def test_downloads(api: Api, late: bool) -> None:
    await bring_in(api, "poet")

    async def call(at: int) -> Call:
        return "GET", "/adapters/poet/download", {}

    async def check(at: int, status: int | None) -> None:
        assert not [path for path in open_files() if path.name == WEIGHTS]

    await at_every_await(api, late, call, check)


async def test_cancelling_jobs(api: Api, late: bool) -> None:
    api.engine.go_jobs.clear()
    jobs: list[str] = []

    async def call(at: int) -> Call:
        jobs.append((await api.submit())["id"])
        await api.job_until(jobs[-1], "running")
        return "POST", f"/finetune/{jobs[-1]}/cancel", {}

    async def check(at: int, status: int | None) -> None:
        if CancelJob(id=jobs[-1]) not in api.engine.told:
            assert (await api.call("POST", f"/finetune/{jobs[-1]}/cancel"))[0] == 200
        job = await api.job_until(jobs[-1], "cancelled")
        assert job["state"] == "cancelled"
        await api.settled()

    await at_every_await(api, late, call, check)


@pytest.mark.parametrize("order", ["pause", "resume"])
async def test_pausing_and_resuming_jobs(api: Api, late: bool, order: str) -> None:
    """What the registry says of the job, the engine does: in the end it succeeds."""
    jobs: list[str] = []

    async def call(at: int) -> Call:
        api.engine.go_jobs.clear()
        jobs.append((await api.submit(adapter=f"poet-{at}"))["id"])
        await api.job_until(jobs[-1], "running")
        if order == "resume":
            assert (await api.call("POST", f"/finetune/{jobs[-1]}/pause"))[1]["state"] == "paused"
        return "POST", f"/finetune/{jobs[-1]}/{order}", {}

    async def check(at: int, status: int | None) -> None:
        await asyncio.sleep(0)
        _, job = await api.call("GET", f"/finetune/{jobs[-1]}")
        if job["state"] == "paused":
            assert (await api.call("POST", f"/finetune/{jobs[-1]}/resume"))[0] == 200
        api.engine.go_jobs.set()
        async with asyncio.timeout(120):
            job = await api.job_until(jobs[-1], "succeeded")
        assert job["state"] == "succeeded"
        await api.settled()

    await at_every_await(api, late, call, check)


@pytest.mark.parametrize("stream", [False, True])
async def test_generations(api: Api, late: bool, stream: bool) -> None:
    """Nothing stays taken: the adapter can be deleted at once."""

    async def call(at: int) -> Call:
        await bring_in(api, "poet")
        return "POST", "/generate", {"json": {"prompt": "x", "adapter": "poet", "stream": stream}}

    async def check(at: int, status: int | None) -> None:
        assert (await api.call("DELETE", "/adapters/poet"))[0] == 200

    await at_every_await(api, late, call, check)


async def test_a_restart_finds_nothing_to_clear_away(api: Api, late: bool) -> None:
    """After imports and submissions that were cut."""
    for at in range(1, 12):
        await attempt(api, ("POST", "/adapters", {"json": {"name": "poet", "path": "rank2"}}), at, late)
        await attempt(api, ("POST", "/finetune", {"json": {"adapter": "bard", "data": ROWS}}), at, late)
    registry = Registry(api.folder.database)
    try:
        rows, files = registry.adapter_refs(), api.folder.adapter_refs()
        for job in registry.unfinished():
            registry.set_state(job.spec.id, JobState.CANCELLED)
        recover(registry, api.folder)
        assert (registry.adapter_refs(), api.folder.adapter_refs()) == (rows, files)
        assert registry.notes() == []
    finally:
        registry.close()


async def batch_file(api: Api) -> str:
    """The id of an uploaded file with one request."""
    body = {"model": "fake", "prompt": "x", "max_tokens": 2}
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    data = aiohttp.FormData({"purpose": "batch"})
    data.add_field("file", json.dumps(asked), filename="asked.jsonl")
    return str((await api.answered(200, "POST", "/v1/files", data=data))["id"])


async def ended_batches(api: Api) -> list[str]:
    """The states of all batches once none runs."""
    while True:
        _, batches = await api.call("GET", "/v1/batches", params={"limit": "100"})
        states = [batch["status"] for batch in batches["data"]]
        if set(states) <= {"completed", "cancelled"}:
            return states
        await asyncio.sleep(0.01)


async def test_batches(api: Api, late: bool) -> None:
    """A batch that is there runs."""
    file = await batch_file(api)

    async def call(at: int) -> Call:
        return "POST", "/v1/batches", {"json": {"input_file_id": file, "endpoint": "/v1/completions"}}

    async def check(at: int, status: int | None) -> None:
        async with asyncio.timeout(20):
            await ended_batches(api)

    await at_every_await(api, late, call, check)


async def test_cancelling_batches(api: Api, late: bool) -> None:
    """A batch that says that it is being cancelled ends, and answers nothing more."""
    file = await batch_file(api)
    api.engine.go_requests.clear()
    batches: list[str] = []

    async def call(at: int) -> Call:
        body = {"input_file_id": file, "endpoint": "/v1/completions"}
        batches.append((await api.answered(200, "POST", "/v1/batches", json=body))["id"])
        while (await api.call("GET", f"/v1/batches/{batches[-1]}"))[1]["status"] != "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return "POST", f"/v1/batches/{batches[-1]}/cancel", {}

    async def check(at: int, status: int | None) -> None:
        _, batch = await api.call("GET", f"/v1/batches/{batches[-1]}")
        if batch["status"] == "in_progress":
            assert status is None
            assert (await api.call("POST", f"/v1/batches/{batches[-1]}/cancel"))[0] == 200
        async with asyncio.timeout(20):
            assert set(await ended_batches(api)) == {"cancelled"}

    await at_every_await(api, late, call, check)


async def test_quotas(api: Api, late: bool) -> None:
    """A quota that is stored holds."""

    async def call(at: int) -> Call:
        return "PUT", f"/admin/quotas/project-{at}", {"json": {"jobs": at}}

    async def check(at: int, status: int | None) -> None:
        with closing(Registry(api.folder.database)) as registry:
            stored = registry.quotas()
        _, listed = await api.call("GET", "/admin/quotas")
        assert listed["data"].keys() == stored.keys()

    await at_every_await(api, late, call, check, every=1)


async def test_pins(api: Api, late: bool) -> None:
    """The engine is told of a pin that is stored."""
    await bring_in(api, "poet")

    async def call(at: int) -> Call:
        await api.answered(200, "PATCH", "/adapters/poet", json={"pinned": False})
        return "PATCH", "/adapters/poet", {"json": {"pinned": True}}

    async def check(at: int, status: int | None) -> None:
        _, shown = await api.call("GET", "/adapters/poet")
        assert api.engine.heard(PrefetchAdapter)[-1].pinned == shown["pinned"]

    await at_every_await(api, late, call, check, every=1)
