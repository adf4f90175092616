"""Adapters that leave no page of the pool for tokens, over the real engine: refused where they come in, and named where
they were in already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coserve.core.types import AdapterRef
from tests.support.api_server import Api
from tests.support.crash_oracle import ROWS
from tests.support.real_server import serve_real

TRAINING = {"steps": 1, "batch_tokens": 64, "max_length": 64, "learning_rate": 0.02, "seed": 3}
RANK = 64
SMALL, LARGE = 256, 16384
"""Tokens of a pool that an adapter of `RANK` fills, and of one with room beside it."""


def job(rank: int, **more: Any) -> dict[str, Any]:
    training = TRAINING | more.pop("training", {})
    return {"adapter": "big", "data": ROWS, "lora": {"r": rank}, "training": training} | more


async def train(api: Api, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a job that succeeds."""
    accepted = await api.answered(202, "POST", "/finetune", json=body)
    events = [event for _, event in await api.events(accepted["id"])]
    assert events[-1]["state"] == "succeeded", events
    return events


def notes(events: list[dict[str, Any]]) -> list[str]:
    """Of samples that are missing."""
    return [event["message"] for event in events if event["message"] and "no sample" in event["message"]]


async def refused(api: Api, field: str | None, path: str, **call: Any) -> str:
    """The message of a refusal."""
    status, body = await api.call("POST", path, **call)
    error = body["error"]
    assert (status, error["code"], error["field"]) == (422, "adapter_too_large", field)
    assert "--kv-tokens" in error["message"] and f"({SMALL} tokens" in error["message"], error
    return str(error["message"])


async def test_jobs_and_imports_of_adapters_that_can_never_be_served_are_refused(tmp_path: Path) -> None:
    async with serve_real(tmp_path / "large", kv_tokens=LARGE) as api:
        await train(api, job(RANK))
        trained = api.folder.adapter(AdapterRef("big", 1))
    settings = {"name": "poet", "path": str(trained.relative_to(tmp_path))}
    async with serve_real(tmp_path / "small", kv_tokens=SMALL, data_root=tmp_path) as api:
        assert "got 'big' of 73 pages" in await refused(api, "lora", "/finetune", json=job(RANK))
        assert "got 'poet' of 73 pages" in await refused(api, None, "/adapters", json=settings)
        assert (await api.call("GET", "/adapters"))[1]["data"] == []
        assert not any(api.folder.staging.iterdir()) and api.folder.adapter_refs() == []
        await train(api, job(2))
        assert (await api.call("POST", "/generate", json={"prompt": "x", "adapter": "big", "max_tokens": 2}))[0] == 200


async def test_adapters_of_a_daemon_with_a_larger_pool_are_named_at_each_request(tmp_path: Path) -> None:
    async with serve_real(tmp_path, kv_tokens=LARGE) as api:
        await train(api, job(RANK))
        generate = {"prompt": "x", "adapter": "big", "max_tokens": 2}
        assert (await api.call("POST", "/generate", json=generate))[0] == 200
    async with serve_real(tmp_path, kv_tokens=SMALL) as api:
        said = await refused(api, None, "/generate", json=generate)
        assert "'big@1'" in said
        await refused(api, "continue_from", "/finetune", json=job(RANK, continue_from="big", lora=None))
        chat = {"model": "big", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        for route, body in (
            ("completions", {"model": "big", "prompt": "x", "max_tokens": 2}),
            ("chat/completions", chat),
        ):
            error = await api.error(422, "adapter_too_large", "POST", f"/v1/{route}", json=body)
            assert error["message"] == said
    least = int(said.split("--kv-tokens ")[1].split()[0])
    async with serve_real(tmp_path, kv_tokens=least) as api:
        assert (await api.call("POST", "/generate", json=generate))[0] == 200
    async with serve_real(tmp_path, kv_tokens=least - 16) as api:
        assert (await api.call("POST", "/generate", json=generate))[0] == 422


async def test_a_job_of_a_daemon_with_a_larger_pool_trains_on_and_says_why_it_has_no_samples(tmp_path: Path) -> None:
    sampling = {"sample_prompts": ["The quick"], "sample_steps": 1, "sample_max_tokens": 4}
    async with serve_real(tmp_path, kv_tokens=LARGE, max_active_jobs=1) as api:
        accepted = await api.answered(202, "POST", "/finetune", json=job(RANK, training=sampling))
        assert (await api.call("POST", f"/finetune/{accepted['id']}/pause"))[0] == 200
    async with serve_real(tmp_path, kv_tokens=SMALL) as api:
        assert (await api.call("POST", f"/finetune/{accepted['id']}/resume"))[0] == 200
        events = [event for _, event in await api.events(accepted["id"])]
    assert events[-1]["state"] == "succeeded"
    (note,) = notes(events)
    assert note.startswith("no sample of prompt 0 at step 1: ")
    assert "'big'" in note and "--kv-tokens" in note and "snapshot" not in note, note


async def test_a_sample_that_is_too_long_beside_its_adapter_is_told_with_the_adapters_name(tmp_path: Path) -> None:
    sampling = {"sample_prompts": ["The quick"], "sample_steps": 1, "sample_max_tokens": 250}
    async with serve_real(tmp_path, kv_tokens=SMALL) as api:
        events = await train(api, job(8, training=sampling))
    (note,) = notes(events)
    assert "beside the adapter big)" in note and "snapshot" not in note, note
