"""vLLM's endpoints that load and unload adapters, with a path or with the tensors in the body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coserve.core.link.engine import DropAdapter, PrefetchAdapter
from coserve.core.link.generation import Generate
from coserve.core.names import ADAPTER_FILES
from coserve.core.schemas.adapters import Adapter
from coserve.core.types import AdapterRef
from tests.support.api_server import Api, form
from tests.support.fake_engine import write_peft

LOADED = "Success: LoRA adapter 'poet' added successfully."


@pytest.fixture
def root(api: Api) -> Path:
    """The allowed root, with two adapters."""
    for rank, name in enumerate(("one", "two"), start=1):
        write_peft(api.root / name, api.base, rank=rank)
    return api.root


async def post(api: Api, action: str, **body: Any) -> tuple[int, str]:
    async with api.http.post(f"/v1/{action}_lora_adapter", json={"lora_name": "poet"} | body) as response:
        return response.status, await response.text()


async def send_tensors(api: Api, folder: Path, **settings: Any) -> tuple[int, str]:
    sent = form({"lora_name": "poet"} | settings, *(folder / name for name in ADAPTER_FILES))
    async with api.http.post("/v1/load_lora_adapter", data=sent) as response:
        return response.status, await response.text()


async def test_load_use_and_unload(api: Api, root: Path) -> None:
    assert await post(api, "load", lora_path=str(root / "one"), load_inplace=False) == (200, LOADED)
    status, answer = await api.call("POST", "/v1/completions", json={"model": "poet", "prompt": "x"})
    assert (status, answer["model"]) == (200, "poet")
    status, text = await post(api, "load", lora_path="two")
    assert status == 400
    assert "The lora adapter 'poet' has already been loaded." in text
    assert await post(api, "unload") == (200, "Success: LoRA adapter 'poet' removed successfully.")
    assert api.folder.adapter_refs() == []
    status, text = await post(api, "unload")
    assert (status, json.loads(text)["error"]["param"]) == (404, "lora_name")
    assert (await api.call("POST", "/v1/completions", json={"model": "poet", "prompt": "x"}))[0] == 404
    assert (await post(api, "load", lora_name="org/poet", lora_path="one"))[0] == 200
    status, answer = await api.call("POST", "/v1/completions", json={"model": "org/poet", "prompt": "x"})
    assert (status, answer["model"]) == (200, "org/poet")
    assert (await post(api, "unload", lora_name="org/poet"))[0] == 200
    assert api.folder.adapter_refs() == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [("none", 404), ("one/adapter_config.json", 404), ("../data", 403), ("/etc", 403), (None, 400)],
)
async def test_only_folders_below_the_root_are_loaded(api: Api, root: Path, path: str | None, expected: int) -> None:
    status, text = await post(api, "load", lora_path=path)
    assert (status, json.loads(text)["error"]["param"]) == (expected, "lora_path")
    assert api.folder.adapter_refs() == []


async def test_a_snapshot_in_the_hubs_cache_is_loaded_and_no_link_out_of_the_root(
    api: Api, root: Path, tmp_path: Path
) -> None:
    """The hub's cache keeps files as `blobs`, and links to them in `snapshots`."""
    snapshot, blobs = root / "models--a--poet" / "snapshots" / "main", root / "models--a--poet" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for name in ADAPTER_FILES:
        (root / "one" / name).rename(blobs / f"of-{name}")
        (snapshot / name).symlink_to(f"../../blobs/of-{name}")
    assert await post(api, "load", lora_path=str(snapshot)) == (200, LOADED)
    status, made = await api.call("POST", "/adapters", json={"name": "other", "path": str(snapshot)})
    assert (status, made["rank"]) == (201, 1)
    stored = api.folder.adapter(AdapterRef("other", 1)) / ADAPTER_FILES[0]
    assert stored.is_file() and not stored.is_symlink()

    write_peft(tmp_path / "outside", api.base)
    for target in (tmp_path / "outside" / ADAPTER_FILES[1], root / "none", snapshot / ADAPTER_FILES[1]):
        (snapshot / ADAPTER_FILES[1]).unlink()
        (snapshot / ADAPTER_FILES[1]).symlink_to(target)
        status, text = await post(api, "load", lora_path=str(snapshot), load_inplace=True)
        assert (status, json.loads(text)["error"]["code"]) == (422, "unsafe_adapter")
        assert "under data_root" in text
    assert [*api.folder.staging.iterdir()] == []


async def test_reloads_in_place_leave_one_version_and_never_a_half_old_request(api: Api, root: Path) -> None:
    await api.call("POST", "/adapters", json={"name": "poet", "path": "one"})
    for name in ("one", "two", "one", "two"):
        assert await send_tensors(api, root / name, load_inplace=True) == (200, LOADED)
    assert api.folder.adapter_refs() == [AdapterRef("poet", 1), AdapterRef("poet", 5)]  # what was imported stays
    dropped = [message.ref.version for message in await api.engine.saw(DropAdapter, 3)]
    assert dropped == [2, 3, 4]
    await api.call("POST", "/v1/completions", json={"model": "poet", "prompt": "x"})
    assert [sent.adapter for sent in await api.engine.saw(Generate)] == [AdapterRef("poet", 5)]
    assert (await post(api, "unload"))[0] == 200
    assert (await api.call("GET", "/adapters/poet"))[1]["ref"] == "poet@1"
    status, text = await post(api, "unload")
    assert status == 400
    assert "DELETE /adapters" in text
    assert (await send_tensors(api, root / "one", lora_path="one"))[0] == 400


async def test_a_version_that_is_loaded_in_place_keeps_the_pin(api: Api, root: Path) -> None:
    assert (await post(api, "load", lora_path="one"))[0] == 200
    await api.answered(200, "PATCH", "/adapters/poet", json={"pinned": True})
    assert (await post(api, "load", lora_path="two", load_inplace=True))[0] == 200
    assert (await api.call("GET", "/adapters/poet"))[1]["pinned"]
    told = [each.ref.version for each in await api.engine.saw(PrefetchAdapter, 4) if each.pinned]
    assert told == [1, 2]


async def test_a_running_request_keeps_the_weights_that_were_replaced_or_unloaded(api: Api, root: Path) -> None:
    assert (await post(api, "load", lora_path="one"))[0] == 200
    api.engine.stall_after = 1
    async with api.http.post("/generate", json={"prompt": "x", "adapter": "poet", "stream": True}) as response:
        await api.engine.saw(Generate)
        await response.content.readline()
        assert (await post(api, "load", lora_path="two", load_inplace=True))[0] == 200
        assert api.folder.adapter_refs() == [AdapterRef("poet", 1), AdapterRef("poet", 2)]
        assert (await api.call("GET", "/adapters/poet"))[1]["versions"] == [2]
        response.close()
    (dropped,) = await api.engine.saw(DropAdapter)
    assert dropped.ref == AdapterRef("poet", 1)


async def test_a_load_that_is_unloaded_at_once_has_succeeded(
    api: Api, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = api.service.adapters
    install = adapters.install

    async def unloaded_at_once(*args: Any, **options: Any) -> Adapter:
        made = await install(*args, **options)
        await adapters.unload("poet")
        return made

    monkeypatch.setattr(adapters, "install", unloaded_at_once)
    assert await post(api, "load", lora_path="one") == (200, LOADED)
    assert api.folder.adapter_refs() == []
