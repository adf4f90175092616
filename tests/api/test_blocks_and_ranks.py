"""Jobs that the daemon's --tp does not fit: new ones are refused, accepted ones wait for a daemon that they fit."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from coserve.core.link.jobs import StartJob
from coserve.core.types import BaseSpec, LoraSettings, SiteSpec
from coserve.lora.files.peft import adapter_config
from coserve.state.failpoints import armed
from tests.support.api_server import Api, serve_api
from tests.support.fake_engine import SITE

ROWS = [{"text": "one two three"}]
THREE = LoraSettings(r=3, bd_blocks=3, targets=("q_proj",))
FOLDER = "three"
"""In the data root: an adapter of three blocks."""


@asynccontextmanager
async def daemon(path: Path, tp: int) -> AsyncIterator[Api]:
    """Over a base whose site has three features for each of two GPUs."""
    root = path / "root"
    root.mkdir(exist_ok=True)
    async with serve_api(path / "data", engine=False, tp=tp, data_root=root) as api:
        api.base = msgspec.structs.replace(api.base, sites={SITE: SiteSpec(6, 6, 0)})
        await api.start_engine()
        api.engine.write_adapter = write_three_blocks
        yield api


def write_three_blocks(folder: Path, base: BaseSpec) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(THREE, base, [SITE])))
    name = f"base_model.model.{SITE}"
    a, b = np.zeros((3, 6), np.float32), np.zeros((6, 1), np.float32)
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")


def sent(api: Api) -> list[str]:
    return [message.spec.id for message in api.engine.heard(StartJob)]


async def shown(api: Api, id: str) -> tuple[str, str | None]:
    _, job = await api.call("GET", f"/finetune/{id}")
    return job["state"], job["waiting"]


async def test_a_new_job_is_refused_with_the_field_and_both_numbers(tmp_path: Path) -> None:
    async with daemon(tmp_path, tp=2) as api:
        body = {"adapter": "poet", "data": ROWS, "lora": {"r": 3, "bd_blocks": 3}}
        error = await api.refused(400, "invalid_request", "POST", "/finetune", json=body)
        assert error["field"] == "lora.bd_blocks"
        assert "--tp 2" in error["message"] and "got 3" in error["message"]
        await api.submit(lora={"r": 2, "bd_blocks": 2})
        write_three_blocks(tmp_path / "root" / FOLDER, api.base)
        status, adapter = await api.call("POST", "/adapters", json={"name": "three", "path": FOLDER})
        assert (status, adapter["bd_blocks"]) == (201, 3), "it can be served"
        body = {"adapter": "more", "data": ROWS, "continue_from": "three"}
        error = await api.refused(400, "invalid_request", "POST", "/finetune", json=body)
        assert error["field"] == "continue_from"
        assert "--tp 2" in error["message"] and "got 3" in error["message"]


BLOCKS: dict[str, Any] = {"lora": {"r": 3, "bd_blocks": 3}}
NEEDS = "needs a --tp that its 3 blocks fit; this daemon has 2"


async def test_an_accepted_job_waits_for_a_daemon_that_it_fits(tmp_path: Path) -> None:
    async with daemon(tmp_path, tp=1) as api:
        api.engine.go_jobs.clear()
        id = (await api.submit(**BLOCKS))["id"]
        await api.job_until(id, "running")
        plain = (await api.submit(adapter="plain"))["id"]
    async with daemon(tmp_path, tp=2) as api:
        await api.job_until(plain, "succeeded")
        assert sent(api) == [plain]
        assert await shown(api, id) == ("queued", NEEDS)
        assert (await api.call("POST", f"/finetune/{id}/pause"))[1]["state"] == "paused"
        status, resumed = await api.call("POST", f"/finetune/{id}/resume")
        assert (status, resumed["state"], resumed["waiting"], sent(api)) == (200, "queued", NEEDS, [plain])
        await api.engine.die()
        await api.start_engine()
        assert await shown(api, id) == ("queued", NEEDS)
    async with daemon(tmp_path, tp=1) as api:
        done = await api.job_until(id, "succeeded")
        assert (done["result"], done["waiting"]) == ("poet@1", None)
        texts = [event["message"] for _, event in await api.events(id)]
        assert NEEDS in texts


async def test_a_paused_job_stays_paused_and_a_waiting_one_can_be_cancelled(tmp_path: Path) -> None:
    async with daemon(tmp_path, tp=1) as api:
        api.engine.go_jobs.clear()
        first, second = [(await api.submit(adapter=name, **BLOCKS))["id"] for name in ("one", "two")]
        assert (await api.call("POST", f"/finetune/{first}/pause"))[0] == 200
    async with daemon(tmp_path, tp=2) as api:
        assert (await shown(api, first), await shown(api, second)) == (("paused", None), ("queued", NEEDS))
        assert (await api.call("POST", f"/finetune/{second}/cancel"))[1]["state"] == "cancelled"
        assert sent(api) == []
    async with daemon(tmp_path, tp=1) as api:
        assert await shown(api, first) == ("paused", None)
        assert (await api.call("POST", f"/finetune/{first}/resume"))[0] == 200
        await api.job_until(first, "succeeded")


async def test_a_note_that_cannot_be_written_leaves_the_job_and_the_engine_alone(tmp_path: Path) -> None:
    async with daemon(tmp_path, tp=1) as api:
        api.engine.obeys = False  # the job stays in line
        id = (await api.submit(**BLOCKS))["id"]
    async with serve_api(tmp_path / "data", engine=False, tp=2) as api:
        api.base = msgspec.structs.replace(api.base, sites={SITE: SiteSpec(6, 6, 0)})
        with armed("registry.before_commit=EIO"):
            await api.start_engine()
        await api.works()
        assert (await shown(api, id), sent(api)) == (("queued", None), [])
