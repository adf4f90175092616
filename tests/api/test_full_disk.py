"""A disk that is full when a job is done, over a real engine: the job waits, space is made, the adapter is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.api_server import Api
from tests.support.real_server import serve_real
from tests.support.small_disk import fill, small_disk

ROWS = [{"text": "the cat sat on the mat"}] * 4


async def submit(api: Api, adapter: str, rank: int) -> str:
    body = {"adapter": adapter, "data": ROWS, "lora": {"r": rank}, "training": {"steps": 2, "batch_tokens": 16}}
    status, job = await api.call("POST", "/finetune", json=body)
    assert status in (200, 201, 202), job
    return str(job["id"])


async def until_it_waits(api: Api, id: str) -> dict[str, Any]:
    async with api.http.get(f"/finetune/{id}/events") as response:
        async for line in response.content:
            assert b'"state":"failed"' not in line, line
            if b"waiting for space" in line:
                break
    _, job = await api.call("GET", f"/finetune/{id}")
    found: dict[str, Any] = job
    return found


@pytest.mark.parametrize("order", ["delete", "cancel"])
async def test_a_job_waits_for_space_and_space_can_be_made(tmp_path: Path, order: str) -> None:
    with small_disk(tmp_path / "disk", 24 << 20) as disk:
        async with serve_real(disk / "data") as api:
            await api.job_until(await submit(api, "old", 64), "succeeded")
            size = sum(file.stat().st_size for file in (disk / "data" / "adapters" / "old" / "1").iterdir())
            fill(disk, leave=size // 8)
            id = await submit(api, "new", 16)
            job = await until_it_waits(api, id)
            assert (job["state"], job["step"]) == ("running", 2)
            assert job["waiting"].startswith("waiting for space")
            fill(disk)
            body = await api.answered(200, "POST", "/generate", json={"prompt": "hello", "max_tokens": 2})
            if order == "delete":
                body = await api.answered(200, "DELETE", "/adapters/old")
                job = await api.job_until(id, "succeeded")
                assert (job["state"], job["waiting"], job["result"]) == ("succeeded", None, "new@1")
            else:
                status, body = await api.call("POST", f"/finetune/{id}/cancel")
                assert (status, body["state"], body["waiting"]) == (200, "cancelled", None)
