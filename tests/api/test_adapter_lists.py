"""Lists of adapters with filters, what a version was made of, and reading one ahead of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from coserve.client import AsyncClient
from coserve.core.errors import BaseMismatch
from coserve.core.link.engine import PrefetchAdapter
from coserve.core.types import AdapterRef
from tests.support.api_server import Api, add_adapter
from tests.support.fake_engine import write_peft


async def names(api: Api, **query: str) -> list[str]:
    listed = await api.answered(200, "GET", "/adapters", params=query)
    return [adapter["id"] for adapter in listed["data"]]


async def test_a_list_is_filtered_before_it_is_cut_into_pages(api: Api) -> None:
    for name in ("Ann-poet", "bard", "poet-a", "poet-b", "poet-c"):
        add_adapter(api, name)
    found: list[str] = []
    async with AsyncClient(f"http://127.0.0.1:{api.port}") as client:
        while True:
            page = await client.adapters(search="POET", limit=2, after=found[-1] if found else None, base="fake")
            found += [adapter.id for adapter in page.data]
            if not page.has_more:
                break
    assert found == ["Ann-poet", "poet-a", "poet-b", "poet-c"]
    assert await names(api, base="another") == await names(api, source="job") == await names(api, search="%") == []
    assert await names(api, resident="true") == []
    assert await names(api, source="import", search="bard", resident="false") == ["bard"]
    for name, value in (("source", "hub"), ("resident", "1"), ("colour", "x")):
        code = "unknown_field" if name == "colour" else "invalid_request"
        await api.refused(400, code, "GET", "/adapters", params={name: value})


async def test_a_trained_version_names_its_parent_and_its_data(api: Api) -> None:
    add_adapter(api, "poet")
    assert api.config.data_root is not None
    write_peft(api.config.data_root / "peft", api.base)
    await api.call("POST", "/adapters", json={"name": "first", "path": "peft"})

    async def train(**body: Any) -> dict[str, Any]:
        _, job = await api.call("POST", "/finetune", json={"data": [{"text": "a b"}]} | body)
        await api.job_until(job["id"], "succeeded")
        adapter: dict[str, Any] = (await api.call("GET", f"/adapters/{body['adapter']}"))[1]
        assert adapter["source"] == f"job:{job['id']}"
        return adapter

    made, plain = await train(adapter="second", continue_from="first"), await train(adapter="third")
    assert (made["parent"], plain["parent"]) == ("first@1", None)
    assert made["corpus_digest"] == plain["corpus_digest"] is not None


async def test_an_adapter_is_prefetched_with_its_digests(api: Api) -> None:
    add_adapter(api, "poet")
    add_adapter(api, "other", fingerprint="0" * 16)
    async with AsyncClient(f"http://127.0.0.1:{api.port}") as client:
        assert (await client.prefetch_adapter("poet")).ref == "poet@1"
        with pytest.raises(BaseMismatch):
            await client.prefetch_adapter("other")
    (message,) = await api.engine.saw(PrefetchAdapter)
    assert (message.ref, message.digests.weights) == (AdapterRef("poet", 1), "0" * 64)
    await api.refused(404, "adapter_not_found", "POST", "/adapters/bard/prefetch")
