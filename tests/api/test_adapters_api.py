"""Adapters over HTTP: in by upload or path, listed, read ahead, out as a tar, gone when nobody uses them."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest

from coserve.api.adapters.filters import AdapterFilter
from coserve.client import AsyncClient
from coserve.core.errors import BaseMismatch
from coserve.core.link.engine import DropAdapter, PrefetchAdapter
from coserve.core.link.generation import Generate
from coserve.core.names import ADAPTER_FILES
from coserve.core.schemas.adapters import AdapterUpdate
from coserve.core.types import AdapterRef
from coserve.state.failpoints import armed
from coserve.state.registry.registry import Registry
from tests.support.api_server import Api, add_adapter, form
from tests.support.fake_engine import write_peft
from tests.support.records import import_adapter, make_adapter


def upload(folder: Path, *extra: tuple[str, bytes], name: str = "poet") -> aiohttp.FormData:
    """Every file of `folder`, and `extra` ones."""
    return form({"name": name}, *sorted(folder.iterdir()), *extra)


def of_poet(*files: Path) -> aiohttp.FormData:
    return form({"name": "poet"}, *files)


def shortened(archive: Path) -> Path:
    """A copy that ends before the second file does."""
    cut = archive.with_name(f"cut{''.join(archive.suffixes)}")
    cut.write_bytes(archive.read_bytes()[: min(1500, archive.stat().st_size // 2)])
    return cut


@pytest.fixture
def peft(tmp_path: Path, api: Api) -> Path:
    write_peft(tmp_path / "peft", api.base, rank=3)
    return tmp_path / "peft"


@pytest.mark.parametrize("kind", ["tar", "gztar", "zip"])
async def test_an_archive_is_imported_and_a_bad_one_leaves_nothing(api: Api, peft: Path, kind: str) -> None:
    archive = Path(shutil.make_archive(str(peft.parent / "packed"), kind, peft))
    files = [peft / name for name in ADAPTER_FILES]
    status, adapter = await api.call("POST", "/adapters", data=of_poet(archive))
    assert (status, adapter["ref"], adapter["rank"]) == (201, "poet@1", 3)
    cut = shortened(archive)
    await api.refused(422, "corrupt_adapter", "POST", "/adapters", data=of_poet(cut))
    await api.refused(400, "invalid_request", "POST", "/adapters", data=of_poet(archive, archive))
    await api.refused(400, "invalid_request", "POST", "/adapters", data=of_poet(archive, *files))
    await api.refused(400, "invalid_request", "POST", "/adapters", data=of_poet(*files, archive))
    assert api.folder.adapter_refs() == [AdapterRef("poet", 1)]
    assert await asyncio.to_thread(lambda: [*api.folder.staging.iterdir()]) == []


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_files_that_are_not_those_that_were_registered_are_not_sent(api: Api, peft: Path, name: str) -> None:
    await api.call("POST", "/adapters", data=upload(peft))
    path = api.folder.adapter(AdapterRef("poet", 1)) / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    await api.refused(422, "corrupt_adapter", "GET", "/adapters/poet/download")
    path.write_bytes(content)
    assert (await api.http.get("/adapters/poet/download")).status == 200


async def test_upload_show_list_download_delete(api: Api, peft: Path) -> None:
    adapter = await api.answered(201, "POST", "/adapters", data=upload(peft))
    assert (adapter["ref"], adapter["rank"], adapter["source"], adapter["base"]) == ("poet@1", 3, "import", "fake")
    assert (await api.call("POST", "/adapters", data=upload(peft)))[1]["version"] == 2
    assert list(api.folder.staging.iterdir()) == []

    _, shown = await api.call("GET", "/adapters/poet")
    assert (shown["version"], shown["versions"]) == (2, [1, 2])
    assert (await api.call("GET", "/adapters/poet@1"))[1]["version"] == 1
    assert (await api.call("POST", "/adapters", data=upload(peft, name="bard")))[0] == 201
    _, listed = await api.call("GET", "/adapters", params={"limit": "1"})
    assert ([each["id"] for each in listed["data"]], listed["has_more"]) == (["bard"], True)
    _, listed = await api.call("GET", "/adapters", params={"after": "bard"})
    assert [each["ref"] for each in listed["data"]] == ["poet@2"]

    async with api.http.get("/adapters/poet@1/download") as response:
        assert response.headers["Content-Disposition"] == 'attachment; filename="poet-1.tar"'
        with tarfile.open(fileobj=io.BytesIO(await response.read())) as tar:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                content = tar.extractfile(f"poet-1/{file}")
                assert content is not None
                assert content.read() == (peft / file).read_bytes()

    await api.call("POST", "/generate", json={"prompt": "x", "adapter": "poet@1"})
    status, gone = await api.call("DELETE", "/adapters/poet")
    assert (status, gone) == (200, {"id": "poet", "versions": [1, 2], "current_ref": None})
    assert len(await api.engine.saw(DropAdapter, 2)) == 2
    assert api.folder.adapter_refs() == [AdapterRef("bard", 1)]
    for method in ("GET", "DELETE"):
        await api.refused(404, "adapter_not_found", method, "/adapters/poet")
    await api.refused(404, "adapter_not_found", "GET", "/adapters/poet/download")
    await api.refused(404, "adapter_not_found", "POST", "/generate", json={"prompt": "x", "adapter": "poet@1"})
    assert (await api.call("POST", "/adapters", data=upload(peft)))[1]["version"] == 3  # never one that was another


async def test_import_from_a_local_path(api: Api) -> None:
    write_peft(api.root / "mine", api.base)
    (api.root / "mine" / "README.md").write_text("not copied")
    status, adapter = await api.call("POST", "/adapters", json={"name": "mine", "path": "mine"})
    assert (status, adapter["ref"]) == (201, "mine@1")
    assert len(list(api.folder.adapter(AdapterRef("mine", 1)).iterdir())) == 2


async def test_a_deleted_adapter_stays_for_the_requests_that_use_it(api: Api, peft: Path) -> None:
    await api.call("POST", "/adapters", data=upload(peft))
    api.engine.stall_after = 1
    async with api.http.post("/generate", json={"prompt": "x", "adapter": "poet", "stream": True}) as response:
        await api.engine.saw(Generate)
        await response.content.readline()
        assert (await api.call("DELETE", "/adapters/poet"))[0] == 200
        assert (await api.call("POST", "/generate", json={"prompt": "x", "adapter": "poet"}))[0] == 404
        assert api.folder.adapter_refs() == [AdapterRef("poet", 1)]
        assert not api.engine.heard(DropAdapter)
        response.close()
    assert await api.engine.saw(DropAdapter) == [DropAdapter(ref=AdapterRef("poet", 1))]


async def test_an_adapter_of_another_base_is_refused_by_name(api: Api, peft: Path) -> None:
    await api.call("POST", "/adapters", data=upload(peft))
    await api.engine.die()
    api.base = msgspec.structs.replace(api.base, fingerprint="0" * 16)
    await api.start_engine()
    await api.refused(422, "base_mismatch", "POST", "/generate", json={"prompt": "x", "adapter": "poet"})
    job = {"adapter": "other", "continue_from": "poet", "data": [{"text": "a b"}]}
    await api.refused(422, "base_mismatch", "POST", "/finetune", json=job)


@pytest.mark.parametrize("alpha", [0, -8])
async def test_an_adapter_that_cannot_be_trained_is_not_continued(api: Api, peft: Path, alpha: int) -> None:
    """It is served as it is."""
    config = peft / "adapter_config.json"
    config.write_bytes(msgspec.json.encode(msgspec.json.decode(config.read_bytes()) | {"lora_alpha": alpha}))
    assert (await api.call("POST", "/adapters", data=upload(peft)))[0] == 201
    job = {"adapter": "other", "continue_from": "poet", "data": [{"text": "a b"}]}
    refused = await api.refused(400, "invalid_request", "POST", "/finetune", json=job)
    assert refused["field"] == "continue_from"
    assert "poet@1" in refused["message"] and "alpha: expected a number above 0" in refused["message"]


async def test_a_full_disk_leaves_nothing_of_an_import(api: Api, peft: Path) -> None:
    for point in ("import.before_file_fsync", "import.after_rename", "registry.before_commit"):
        with armed(f"{point}=ENOSPC"):
            await api.error(507, "storage_full", "POST", "/adapters", data=upload(peft))
        assert api.folder.adapter_refs() == []
    assert (await api.call("POST", "/adapters", data=upload(peft)))[0] == 201


async def test_files_that_are_no_adapter(api: Api, peft: Path) -> None:
    async def refused(code: str, sent: aiohttp.FormData, status: int = 422) -> None:
        await api.refused(status, code, "POST", "/adapters", data=sent)
        assert api.folder.adapter_refs() == []
        assert list(api.folder.staging.iterdir()) == []

    await refused("unsafe_adapter", upload(peft, ("adapter_model.bin", b"pickle")))
    await refused("invalid_request", upload(peft, ("other.txt", b"")), 400)
    await refused("invalid_request", upload(peft, ("adapter_config.json", b"{}")), 400)  # twice
    weights, config = peft / "adapter_model.safetensors", peft / "adapter_config.json"
    good: tuple[Any, ...] = (weights.read_bytes(), config.read_text())
    weights.write_bytes(good[0][:-7])
    await refused("corrupt_adapter", upload(peft))
    weights.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    await refused("corrupt_adapter", upload(peft))
    weights.write_bytes(good[0])
    config.write_text(good[1].replace('"LORA"', '"IA3"'))
    await refused("unsupported_adapter", upload(peft))
    config.write_text("{")
    await refused("corrupt_adapter", upload(peft))
    config.unlink()
    await refused("invalid_request", upload(peft), 400)


async def test_an_adapter_may_have_a_name_of_two_parts(api: Api, peft: Path) -> None:
    """As on the hub, wherever an adapter is named; in a path its slash is %2F."""
    for version in (1, 2):
        made = await api.answered(201, "POST", "/adapters", data=upload(peft, name="org/poet"))
        assert made["ref"] == f"org/poet@{version}"
    path = "/adapters/org%2Fpoet"
    assert (await api.answered(200, "GET", path))["versions"] == [1, 2]
    assert (await api.answered(200, "PATCH", path, json={"tags": ["eu"]}))["tags"] == ["eu"]
    await api.refused(400, "invalid_request", "PATCH", path, json={"tags": ["a/b"]})
    assert await names(api, search="G/p", tag="eu") == ["org/poet"]
    assert (await api.answered(200, "POST", f"{path}/rollback", json={"version": 1}))["ref"] == "org/poet@1"
    alias = await api.answered(200, "PUT", "/aliases/org%2Fprod", json={"target": "org/poet@2"})
    assert (alias["name"], alias["target"]) == ("org/prod", "org/poet@2")
    for name, version in {"org/poet": 1, "org/poet@2": 2, "org/prod": 2}.items():
        for path_of_model in (name, name.replace("/", "%2F")):
            model = await api.answered(200, "GET", f"/v1/models/{path_of_model}")
            assert (model["id"], model["root"]) == (name, f"org/poet@{version}")
        await api.answered(200, "POST", "/generate", json={"prompt": "x", "adapter": name})
        await api.answered(200, "POST", "/v1/completions", json={"prompt": "x", "model": name})
        await api.answered(200, "POST", "/generate", json={"inputs": "x", "parameters": {"adapter_id": name}})
        assert {request.adapter for request in api.engine.heard(Generate)[-3:]} == {AdapterRef("org/poet", version)}
    async with api.http.get(f"{path}@1/download") as response:
        assert response.headers["Content-Disposition"] == 'attachment; filename="org+poet-1.tar"'
        with tarfile.open(fileobj=io.BytesIO(await response.read())) as tar:
            assert {member.name.partition("/")[0] for member in tar} == {"org+poet-1"}
    job = {"adapter": "org/poet", "continue_from": "org/poet@2", "data": [{"text": "a"}]}
    assert (await api.answered(202, "POST", "/finetune", json=job))["version"] == 3
    error = await api.refused(404, "not_found", "GET", "/adapters/org/poet")
    assert error["message"] == "there is no such path; in a path the '/' of a name is written %2F"
    await api.answered(200, "DELETE", "/aliases/org%2Fprod")
    assert (await api.answered(200, "DELETE", f"{path}@1"))["id"] == "org/poet"
    assert AdapterRef("org/poet", 1) not in api.folder.adapter_refs()


@pytest.mark.parametrize(
    "name",
    ["/poet", "org/", "org//poet", "a/b/c", "../poet", "org/..", "org/.poet", "org+poet", "org%2Fpoet", "a/b/@1"],
)
async def test_no_other_slash_is_part_of_a_name(api: Api, peft: Path, name: str) -> None:
    error = await api.refused(400, "invalid_request", "POST", "/adapters", data=upload(peft, name=name))
    assert "letter or digit, or two of them with a '/' between, got" in error["message"]
    await api.refused(404, "not_found", "GET", f"/adapters/{quote(name, safe='')}")
    assert api.folder.adapter_refs() == []


async def names(api: Api, **query: str) -> list[str]:
    listed = await api.answered(200, "GET", "/adapters", params=query)
    return [adapter["id"] for adapter in listed["data"]]


async def test_a_list_is_filtered_before_it_is_cut_into_pages(api: Api) -> None:
    for name in ("Ann-poet", "bard", "poet-a", "poet-b", "poet-c"):
        add_adapter(api, name)
    found: list[str] = []
    async with AsyncClient(api.url) as client:
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


async def test_a_request_does_not_wait_for_a_long_list(api: Api) -> None:
    with closing(Registry(api.folder.database)) as registry:
        for number in range(210):
            import_adapter(registry, make_adapter(f"bard-{number:03}", base_fingerprint=api.base.fingerprint))
    adapters = api.service.adapters
    await adapters.update("bard-205", None, AdapterUpdate(tags=("eu",)))
    listing = asyncio.create_task(adapters.list(None, 5, AdapterFilter(tag="eu")))
    await asyncio.sleep(0)
    await adapters.get("bard-000", None)
    assert not listing.done()
    assert [adapter.id for adapter in (await listing).data] == ["bard-205"]
    page = await adapters.list("bard-050", 100)
    assert ([len(page.data), page.data[-1].id], page.has_more) == ([100, "bard-150"], True)


async def test_a_trained_version_names_its_parent_and_its_data(api: Api) -> None:
    add_adapter(api, "poet")
    write_peft(api.root / "peft", api.base)
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
    async with AsyncClient(api.url) as client:
        assert (await client.prefetch_adapter("poet")).ref == "poet@1"
        with pytest.raises(BaseMismatch):
            await client.prefetch_adapter("other")
    (message,) = await api.engine.saw(PrefetchAdapter)
    assert (message.ref, message.digests.weights) == (AdapterRef("poet", 1), "0" * 64)
    await api.refused(404, "adapter_not_found", "POST", "/adapters/bard/prefetch")
    refused = await api.refused(404, "adapter_not_found", "POST", f"/adapters/{api.base.name}/prefetch")
    assert "always in memory" in refused["message"]
