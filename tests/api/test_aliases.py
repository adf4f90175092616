"""Aliases in every kind of request; tags, times to live and pins, over HTTP and in the SDK."""

from __future__ import annotations

from collections import Counter

import pytest

from coserve.client import AsyncClient
from coserve.core.errors import AdapterBusy, AdapterNotFound, InvalidRequest, NameTaken
from coserve.core.link.engine import DropAdapter, PrefetchAdapter
from coserve.core.types import AdapterRef
from tests.support.api_server import Api, add_adapter


async def test_every_route_takes_an_alias_and_the_canary_gets_its_share(api: Api) -> None:
    for version in (1, 2):
        add_adapter(api, "poet", version)
    async with AsyncClient(f"http://127.0.0.1:{api.port}") as client:
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


async def test_tags_are_set_and_listed_and_a_time_to_live_ends(api: Api) -> None:
    for name in ("bard", "poet"):
        add_adapter(api, name)
    async with AsyncClient(f"http://127.0.0.1:{api.port}") as client:
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
        with pytest.raises(InvalidRequest, match="ttl: expected 'poet', all of its versions, got poet@1"):
            await client.update_adapter("poet@1", ttl=1)


async def test_a_pin_is_told_to_each_engine(api: Api) -> None:
    add_adapter(api, "poet")
    async with AsyncClient(f"http://127.0.0.1:{api.port}") as client:
        assert (await client.update_adapter("poet", pinned=True)).pinned
        (told,) = await api.engine.saw(PrefetchAdapter)
        assert (told.ref, told.pinned) == (AdapterRef("poet", 1), True)
        await api.engine.die()
        await api.start_engine()
        (told,) = await api.engine.saw(PrefetchAdapter)
        assert told.pinned
        assert not (await client.update_adapter("poet", pinned=False)).pinned
        assert [each.pinned for each in await api.engine.saw(PrefetchAdapter, 2)] == [True, False]
