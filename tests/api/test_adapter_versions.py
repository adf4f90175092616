"""Versions of one name: a new one replaces the one before and says so; older ones stay, come back, and go alone. And
aliases of versions, tags, times to live and pins, over HTTP and in the SDK."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from coserve.api.adapters.lookup import find_adapter
from coserve.client import AsyncClient, Client
from coserve.core.errors import AdapterBusy, AdapterNotFound, InvalidRequest, NameTaken
from coserve.core.link.engine import DropAdapter, PrefetchAdapter
from coserve.core.types import AdapterRef
from coserve.state.registry.registry import Registry
from coserve.state.thread import RegistryThread
from tests.support.api_server import Api, add_adapter
from tests.support.fake_engine import write_peft

ROWS = [{"text": "a b"}]


@pytest.fixture
async def poet(api: Api) -> Api:
    """Three versions of one adapter."""
    write_peft(api.root / "peft", api.base)
    for _ in range(3):
        await bring_in(api)
    return api


async def bring_in(api: Api, name: str = "poet") -> int:
    adapter = await api.answered(201, "POST", "/adapters", json={"name": name, "path": "peft"})
    return int(adapter["version"])


async def meant(api: Api) -> int:
    """The version that answers for the bare name, by each way to ask."""
    _, answered = await api.call("POST", "/generate", json={"prompt": "x", "adapter": "poet"})
    _, shown = await api.call("GET", "/adapters/poet")
    _, listed = await api.call("GET", "/adapters")
    _, model = await api.call("GET", "/v1/models/poet")
    (found,) = {answered["version"], shown["version"], listed["data"][0]["version"], int(model["root"].split("@")[1])}
    assert shown["current"]
    return int(found)


async def test_a_job_that_replaces_a_version_says_so(poet: Api) -> None:
    _, job = await poet.call("POST", "/finetune", json={"adapter": "poet", "data": ROWS})
    (note,) = job["notes"]
    for words in ("version 4", "instead of version 3", "poet@3", "continue_from", "choose another"):
        assert words in note
    await poet.job_until(job["id"], "succeeded")
    said = [event for _, event in await poet.events(job["id"]) if event["type"] == "message"]
    assert [(event["level"], event["message"]) for event in said] == [("warning", note)]
    assert await meant(poet) == 4
    assert (await poet.call("GET", "/adapters/poet@3"))[1]["current"] is False
    assert (await poet.call("POST", "/generate", json={"prompt": "x", "adapter": "poet@3"}))[1]["version"] == 3


async def test_a_job_that_replaces_nothing_says_nothing(poet: Api) -> None:
    for body in ({"adapter": "new"}, {"adapter": "poet", "continue_from": "poet"}):
        _, job = await poet.call("POST", "/finetune", json=body | {"data": ROWS})
        assert job["notes"] == []
        await poet.job_until(job["id"], "succeeded")
    body = {"adapter": "new", "continue_from": "poet", "data": ROWS}
    assert "new@1" in (await poet.call("POST", "/finetune", json=body))[1]["notes"][0]


async def test_a_rollback_holds_until_something_newer_comes(poet: Api) -> None:
    status, adapter = await poet.call("POST", "/adapters/poet/rollback", json={"version": 1})
    assert (status, adapter["ref"], adapter["current"], adapter["versions"]) == (200, "poet@1", True, [1, 2, 3])
    assert await meant(poet) == 1
    again = Registry(poet.folder.database)  # durable
    assert again.current_version("poet") == 1
    again.close()
    poet.engine.go_jobs.clear()
    _, job = await poet.call("POST", "/finetune", json={"adapter": "poet", "data": ROWS})
    assert job["version"] == 4
    assert "instead of version 1" in job["notes"][0]
    assert await meant(poet) == 1
    poet.engine.go_jobs.set()
    await poet.job_until(job["id"], "succeeded")
    assert await meant(poet) == 4
    await poet.call("POST", "/adapters/poet/rollback", json={"version": 2})
    assert await meant(poet) == 2
    for path in ("/adapters", "/adapters/poet"):
        _, shown = await poet.call("GET", path)
        adapter = shown["data"][0] if "data" in shown else shown
        assert (adapter["version"], adapter["newest"]) == (2, 4), path
    assert await bring_in(poet) == 5
    assert await meant(poet) == 5


async def test_a_rollback_to_nothing_is_refused(poet: Api) -> None:
    await poet.refused(404, "adapter_not_found", "POST", "/adapters/poet/rollback", json={"version": 9})
    await poet.refused(404, "adapter_not_found", "POST", "/adapters/bard/rollback", json={"version": 1})
    await poet.refused(400, "invalid_request", "POST", "/adapters/poet/rollback", json={"version": 0})
    await poet.refused(400, "invalid_request", "POST", "/adapters/poet@1/rollback", json={"version": 1})
    assert await meant(poet) == 3


async def test_one_version_is_deleted_alone(poet: Api) -> None:
    deleted = {"id": "poet", "versions": [3], "current_ref": "poet@2"}
    assert await poet.call("DELETE", "/adapters/poet@3") == (200, deleted)
    assert await poet.engine.saw(DropAdapter) == [DropAdapter(ref=AdapterRef("poet", 3))]
    assert poet.folder.adapter_refs() == [AdapterRef("poet", 1), AdapterRef("poet", 2)]
    assert await meant(poet) == 2
    await poet.refused(404, "adapter_not_found", "DELETE", "/adapters/poet@3")
    await poet.call("POST", "/adapters/poet/rollback", json={"version": 1})
    _, deleted = await poet.call("DELETE", "/adapters/poet@1")  # nothing older is left
    assert deleted["current_ref"] == "poet@2"
    assert await meant(poet) == 2
    assert (await poet.call("DELETE", "/adapters/poet@2"))[1]["current_ref"] is None
    await poet.refused(404, "adapter_not_found", "GET", "/adapters/poet")
    assert poet.folder.adapter_refs() == []
    assert await bring_in(poet) == 4


async def test_a_version_that_a_job_continues_from_stays_and_the_others_may_go(poet: Api) -> None:
    poet.engine.go_jobs.clear()
    job = {"adapter": "other", "continue_from": "poet@1", "data": ROWS}
    _, accepted = await poet.call("POST", "/finetune", json=job)
    await poet.refused(409, "adapter_busy", "DELETE", "/adapters/poet@1")
    await poet.call("POST", f"/finetune/{accepted['id']}/cancel")
    assert (await poet.call("DELETE", "/adapters/poet@1"))[0] == 200


@pytest.mark.parametrize("name", ["fake", "FAKE"])
async def test_no_adapter_is_called_as_the_base(poet: Api, name: str) -> None:
    body = await poet.refused(400, "invalid_request", "POST", "/finetune", json={"adapter": name, "data": ROWS})
    assert body["field"] == "adapter"
    body = await poet.refused(400, "invalid_request", "POST", "/adapters", json={"name": name, "path": "peft"})
    assert body["field"] == "name"


async def test_the_sdk(poet: Api) -> None:
    async with AsyncClient(poet.url) as client:
        assert (await client.rollback_adapter("poet", 1)).current
        assert (await client.adapter("poet")).version == 1
        assert (await client.delete_adapter("poet@1")).versions == [1]
        with pytest.raises(AdapterNotFound):
            await client.rollback_adapter("poet", 1)
    assert {"rollback_adapter", "delete_adapter"} <= set(dir(Client))


async def test_a_request_waits_for_no_change_of_the_registry(poet: Api) -> None:
    gate = threading.Event()
    thread = RegistryThread(lambda: Registry(poet.folder.database))
    await thread(lambda registry: registry.notes())
    change = asyncio.create_task(thread(lambda registry: gate.wait(30)))
    await asyncio.sleep(0)
    found = await find_adapter(thread, "poet", None, poet.base, field="adapter")
    assert found.ref == AdapterRef("poet", 3)
    assert not change.done()
    gate.set()
    await change
    await thread.close()


async def test_requests_before_a_deletion_is_committed_are_answered_and_later_ones_find_the_version_before(
    poet: Api,
) -> None:
    async def ask(name: str) -> tuple[int, int | None]:
        status, body = await poet.call("POST", "/generate", json={"prompt": "x", "adapter": name})
        return status, body.get("version")

    with closing(sqlite3.connect(poet.folder.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        deletion = asyncio.create_task(poet.call("DELETE", "/adapters/poet@3"))
        await asyncio.sleep(0.05)
        assert await asyncio.gather(*map(ask, ("poet", "poet@3", "poet@1"))) == [(200, 3), (200, 3), (200, 1)]
        other.execute("COMMIT")
    assert (await deletion)[0] == 200
    assert await asyncio.gather(*map(ask, ("poet", "poet@3"))) == [(200, 2), (404, None)]


async def test_a_deletion_that_fails_leaves_the_version_to_those_who_wait(poet: Api) -> None:
    poet.engine.go_jobs.clear()
    _, job = await poet.call("POST", "/finetune", json={"adapter": "poet", "continue_from": "poet", "data": ROWS})
    deletion = poet.call("DELETE", "/adapters/poet")
    request = poet.call("POST", "/generate", json={"prompt": "x", "adapter": "poet"})
    (refused, _), (status, body) = await asyncio.gather(deletion, request)
    assert (refused, status, body["version"]) == (409, 200, 3)
    await poet.call("POST", f"/finetune/{job['id']}/cancel")


async def test_every_route_takes_an_alias_and_the_canary_gets_its_share(api: Api) -> None:
    for version in (1, 2):
        add_adapter(api, "poet", version)
    async with AsyncClient(api.url) as client:
        first = await client.set_alias("prod", "poet@1")
        assert (first.target, first.canary, first.previous) == ("poet@1", None, None)
        assert (await client.generate("a", adapter="prod")).version == 1
        _, models = await api.call("GET", "/v1/models")
        assert {each["id"]: each["root"] for each in models["data"]}["prod"] == "poet@1"
        _, model = await api.call("GET", "/v1/models/prod")
        assert (model["id"], model["root"], model["parent"]) == ("prod", "poet@1", "fake")
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = {"model": "prod", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            body.pop("messages" if path == "/v1/completions" else "prompt")
            await api.answered(200, "POST", path, json=body)
        assert (await client.set_alias("prod", "poet@1", canary="poet", weight=0.5)).canary == "poet@2"
        got = Counter([(await client.generate("a", adapter="prod")).version for _ in range(24)])
        assert got.keys() == {1, 2}
        with pytest.raises(AdapterBusy):
            await client.delete_adapter("poet@2")
        assert [(each.ref, each.aliases) for each in (await client.adapters()).data] == [("poet@2", ("prod",))]
        assert (await client.adapter("poet@1")).aliases == ("prod",)
        moved = await client.promote_alias("prod")
        assert (moved.target, moved.canary, moved.previous) == ("poet@2", None, "poet@1")
        assert (await client.generate("a", adapter="prod")).version == 2
        assert (await client.rollback_alias("prod")).target == "poet@1"
        assert [alias.name for alias in await client.aliases()] == ["prod"]
        with pytest.raises(NameTaken):
            await client.set_alias("poet", "poet@1")
        with pytest.raises(InvalidRequest):
            await client.set_alias("fake", "poet@1")
        with pytest.raises(AdapterNotFound, match=r"'prof'.*'prod'"):
            await client.generate("a", adapter="prof")
        for name in ("prod", "prod@1"):
            with pytest.raises(AdapterNotFound, match=f"no adapter '{name}': 'prod' is an alias, which means poet@1"):
                await client.adapter(name)
        await client.delete_alias("prod")
        with pytest.raises(AdapterNotFound):
            await client.generate("a", adapter="prod")
    await api.refused(400, "invalid_request", "PUT", "/aliases/a", json={"target": "poet", "weight": 0.5})
    await api.refused(404, "adapter_not_found", "POST", "/aliases/a/promote")
    for fields in ({"target": "bard"}, {"target": "poet", "canary": "bard", "weight": 0.5}):
        refused = await api.refused(404, "adapter_not_found", "PUT", "/aliases/a", json=fields)
        assert refused["field"] == ("canary" if "canary" in fields else "target")


async def test_tags_are_set_and_listed_and_a_time_to_live_ends(api: Api, tmp_path: Path) -> None:
    for name in ("bard", "poet"):
        add_adapter(api, name)
    async with AsyncClient(api.url) as client:
        changed = await client.update_adapter("poet", tags=["eu", "test"], ttl=3600)
        assert changed.tags == ("eu", "test") and changed.expires_at is not None and not changed.pinned
        assert [each.id for each in (await client.adapters(tag="eu")).data] == ["poet"]
        assert (await client.update_adapter("poet", ttl=0)).expires_at is None
        assert (await client.update_adapter("bard", ttl=0.01)).id == "bard"
        (gone,) = await api.engine.saw(DropAdapter)
        assert gone.ref == AdapterRef("bard", 1)
        with pytest.raises(AdapterNotFound):
            await client.adapter("bard")
        assert (await client.adapter("poet")).tags == ("eu", "test")
        write_peft(tmp_path, api.base)
        assert (await client.import_adapter("poet", tmp_path)).tags == ("eu", "test"), "a new version has its name's"
        with pytest.raises(InvalidRequest, match="ttl: expected 'poet', all of its versions, got poet@1"):
            await client.update_adapter("poet@1", ttl=1)
        with pytest.raises(InvalidRequest, match="ttl"):
            await client.update_adapter("poet", ttl=1e308)


async def test_pinned_cartridges_leave_half_of_the_kv_cache_to_requests(api: Api) -> None:
    """The engine of these tests has 1024 tokens. A pin that is refused changes nothing, one that is there may be set
    again, and what has no prefix may always be pinned."""
    for name, tokens in (("atlas", 300), ("bible", 212), ("code", 1), ("poet", 0)):
        add_adapter(api, name, prefix_tokens=tokens)
    add_adapter(api, "foreign", fingerprint="other", prefix_tokens=900)
    async with AsyncClient(api.url) as client:
        for name in ("atlas", "bible", "atlas", "poet"):
            assert (await client.update_adapter(name, pinned=True)).pinned
        error = "expected pinned cartridges of at most 512 tokens in all, .* got 1 beside 512: unpin others"
        with pytest.raises(InvalidRequest, match=error):
            await client.update_adapter("code", pinned=True, tags=["new"])
        assert [(each.id, each.tags) for each in (await client.adapters()).data if not each.pinned] == [
            ("code", ()),
            ("foreign", ()),
        ]
        await client.update_adapter("bible", pinned=False)
        assert (await client.update_adapter("code", pinned=True)).pinned


async def test_a_new_engine_reads_what_requests_used_most(api: Api) -> None:
    """The engine of these tests has room for 1000 bytes, half of it for them: what is larger keeps no other one out."""
    for name in ("bard", "clerk", "poet"):
        add_adapter(api, name, bytes=200)
    add_adapter(api, "saga", bytes=501)
    for name in ("bard", "poet", "poet", "saga", "saga", "saga"):
        await api.answered(200, "POST", "/generate", json={"prompt": "x", "adapter": name})
    await api.engine.die()
    await api.start_engine()
    assert [told.ref.id for told in await api.engine.saw(PrefetchAdapter, 2)] == ["poet", "bard"]


async def test_a_pin_is_told_to_each_engine(api: Api) -> None:
    add_adapter(api, "poet")
    async with AsyncClient(api.url) as client:
        assert (await client.update_adapter("poet", pinned=True)).pinned
        (told,) = await api.engine.saw(PrefetchAdapter)
        assert (told.ref, told.pinned) == (AdapterRef("poet", 1), True)
        await api.engine.die()
        await api.start_engine()
        (told,) = await api.engine.saw(PrefetchAdapter)
        assert told.pinned
        assert not (await client.update_adapter("poet", pinned=False)).pinned
        assert [each.pinned for each in await api.engine.saw(PrefetchAdapter, 2)] == [True, False]
