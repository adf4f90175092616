"""DoRA over HTTP on the bundled base: trained, served in one batch with plain adapters, downloaded and imported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from coserve.core.names import ADAPTER_CONFIG, ADAPTER_FILES
from coserve.core.types import AdapterRef
from coserve.lora.files.tensorfile import read_json
from tests.support.real_jobs import text, train
from tests.support.real_server import serve_real

LORA = {"plain": {"r": 4}, "dora": {"r": 3, "use_dora": True, "dropout": 0.1}}


@pytest.mark.slow
async def test_a_dora_adapter_is_trained_served_with_others_and_imported_again(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        for name, lora in LORA.items():
            job = await train(api, name, lora=lora)
            assert job["lora"]["use_dora"] == lora.get("use_dora", False)
        adapters = [None, *LORA]
        alone = [await text(api, adapter) for adapter in adapters]
        assert await asyncio.gather(*(text(api, adapter) for adapter in adapters * 2)) == alone * 2
        assert alone[0] != alone[2]

        files, form = api.folder.adapter(AdapterRef("dora", 1)), aiohttp.FormData()
        assert read_json(files, ADAPTER_CONFIG)["use_dora"] is True
        form.add_field("settings", '{"name": "again"}', content_type="application/json")
        for name in ADAPTER_FILES:
            form.add_field("file", (files / name).read_bytes(), filename=name)
        status, answer = await api.call("POST", "/adapters", data=form)
        assert status == 201, answer
        assert await text(api, "again") == alone[2]

        job = await train(api, "again", continue_from="again")
        assert (job["result"], job["lora"]["use_dora"]) == ("again@2", True)
        status, answer = await api.call("POST", "/adapters/dora/convert", json={"bd_blocks": 2})
        assert (status, answer["error"]["field"]) == (400, "bd_blocks")
