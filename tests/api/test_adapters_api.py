"""Adapters over HTTP: in by upload or path, out as a tar, gone when nobody uses them."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coserve.core.link.engine import DropAdapter
from coserve.core.link.generation import Generate
from coserve.core.names import ADAPTER_FILES
from coserve.core.types import AdapterRef
from coserve.state.failpoints import armed
from tests.support.api_server import Api
from tests.support.fake_engine import write_peft


def upload(folder: Path, name: str = "poet", **extra: bytes) -> aiohttp.FormData:
    """A form with every file of `folder`, and `extra` ones."""
    form = aiohttp.FormData()
    form.add_field("settings", json.dumps({"name": name}), content_type="application/json")
    for file in sorted(folder.iterdir()):
        form.add_field("file", file.read_bytes(), filename=file.name)
    for file_name, content in extra.items():
        form.add_field("file", content, filename=file_name.replace("__", "."))
    return form


def form(*files: Path) -> aiohttp.FormData:
    """A form with these files."""
    made = aiohttp.FormData()
    made.add_field("settings", json.dumps({"name": "poet"}), content_type="application/json")
    for file in files:
        made.add_field("file", file.read_bytes(), filename=file.name)
    return made


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
    status, adapter = await api.call("POST", "/adapters", data=form(archive))
    assert (status, adapter["ref"], adapter["rank"]) == (201, "poet@1", 3)
    cut = shortened(archive)
    await api.refused(422, "corrupt_adapter", "POST", "/adapters", data=form(cut))
    await api.refused(400, "invalid_request", "POST", "/adapters", data=form(archive, archive))
    await api.refused(400, "invalid_request", "POST", "/adapters", data=form(archive, *files))
    await api.refused(400, "invalid_request", "POST", "/adapters", data=form(*files, archive))
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
    assert (await api.call("POST", "/adapters", data=upload(peft, "bard")))[0] == 201
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
    assert api.config.data_root is not None
    write_peft(api.config.data_root / "mine", api.base)
    (api.config.data_root / "mine" / "README.md").write_text("not copied")
    status, adapter = await api.call("POST", "/adapters", json={"name": "mine", "path": "mine"})
    assert (status, adapter["ref"]) == (201, "mine@1")
    assert len(list(api.folder.adapter(AdapterRef("mine", 1)).iterdir())) == 2


async def test_a_deleted_adapter_stays_for_the_requests_that_use_it_and_for_jobs_it_is_not_deleted(
    api: Api, peft: Path
) -> None:
    await api.call("POST", "/adapters", data=upload(peft))
    api.engine.stall_after = 1
    async with api.http.post("/generate", json={"prompt": "x", "adapter": "poet", "stream": True}) as response:
        await api.engine.saw(Generate)
        await response.content.readline()
        assert (await api.call("DELETE", "/adapters/poet"))[0] == 200
        assert (await api.call("POST", "/generate", json={"prompt": "x", "adapter": "poet"}))[0] == 404
        assert api.folder.adapter_refs() == [AdapterRef("poet", 1)]
        assert not any(isinstance(message, DropAdapter) for message in api.engine.told)
        response.close()
    assert await api.engine.saw(DropAdapter) == [DropAdapter(ref=AdapterRef("poet", 1))]
    api.engine.stall_after = None
    api.engine.go_jobs.clear()
    await api.call("POST", "/adapters", data=upload(peft))
    job = {"adapter": "other", "continue_from": "poet", "data": [{"text": "a b"}]}
    _, accepted = await api.call("POST", "/finetune", json=job)
    await api.refused(409, "adapter_busy", "DELETE", "/adapters/poet")
    await api.call("POST", f"/finetune/{accepted['id']}/cancel")
    assert (await api.call("DELETE", "/adapters/poet"))[0] == 200


async def test_an_adapter_of_another_base_is_refused_by_name(api: Api, peft: Path) -> None:
    import msgspec

    await api.call("POST", "/adapters", data=upload(peft))
    await api.engine.die()
    api.base = msgspec.structs.replace(api.base, fingerprint="0" * 16)
    await api.start_engine()
    await api.refused(422, "base_mismatch", "POST", "/generate", json={"prompt": "x", "adapter": "poet"})
    job = {"adapter": "other", "continue_from": "poet", "data": [{"text": "a b"}]}
    await api.refused(422, "base_mismatch", "POST", "/finetune", json=job)


async def test_a_full_disk_leaves_nothing_of_an_import(api: Api, peft: Path) -> None:
    for point in ("import.before_file_fsync", "import.after_rename", "registry.before_commit"):
        with armed(f"{point}=ENOSPC"):
            status, body = await api.call("POST", "/adapters", data=upload(peft))
        assert (status, body["error"]["code"]) == (507, "storage_full"), point
        assert api.folder.adapter_refs() == []
    assert (await api.call("POST", "/adapters", data=upload(peft)))[0] == 201


async def test_files_that_are_no_adapter(api: Api, peft: Path) -> None:
    async def refused(code: str, form: aiohttp.FormData, status: int = 422) -> None:
        await api.refused(status, code, "POST", "/adapters", data=form)
        assert api.folder.adapter_refs() == []
        assert list(api.folder.staging.iterdir()) == []

    await refused("unsafe_adapter", upload(peft, adapter_model__bin=b"pickle"))
    await refused("invalid_request", upload(peft, other__txt=b""), 400)
    await refused("invalid_request", upload(peft, adapter_config__json=b"{}"), 400)  # twice
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
