"""An `Idempotency-Key` belongs to one request: repeated, it gives the first job; with anything else it is refused."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tests.support.api_server import Api, form

REQUEST: dict[str, Any] = {
    "adapter": "poet",
    "data": [{"text": "the cat sat"}, {"text": "the dog ran"}],
    "lora": {"r": 2},
    "training": {"steps": 3, "learning_rate": 1e-3},
    "metadata": {"who": "me", "why": "test"},
}
ONCE = {"Idempotency-Key": "once"}


async def job_of(api: Api, request: dict[str, Any]) -> str:
    job = await api.answered(202, "POST", "/finetune", json=request, headers=ONCE)
    return str(job["id"])


@pytest.fixture(autouse=True)
def jobs_wait(api: Api) -> None:
    api.engine.go_jobs.clear()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lora": {"r": 4}}, "lora.r"),
        ({"training": {"steps": 3, "learning_rate": 2e-3}}, "training.learning_rate"),
        ({"training": {"steps": 3}}, "training.learning_rate"),
        ({"data": [{"text": "the cat sat"}, {"text": "the dog slept"}]}, "data"),
        ({"data": [{"text": "the cat sat"}]}, "data"),
        ({"on_conflict": "refuse"}, "on_conflict"),
        ({"metadata": {"who": "you"}}, "metadata"),
        ({"adapter": "another"}, "adapter"),
        ({"lora": {"r": 4}, "training": {"steps": 9, "learning_rate": 1e-3}}, "lora.r and training.steps"),
    ],
)
async def test_a_key_of_another_request_is_refused(api: Api, change: dict[str, Any], named: str) -> None:
    first = await job_of(api, REQUEST)
    error = await api.refused(422, "idempotency_mismatch", "POST", "/finetune", headers=ONCE, json=REQUEST | change)
    assert (error["field"], first in error["message"]) == ("Idempotency-Key", True)
    assert f"another {named};" in error["message"]
    assert api.folder.job_ids() == [first]


async def test_the_same_request_in_other_words_gives_the_first_job(api: Api) -> None:
    first = await job_of(api, REQUEST)
    same = {
        "metadata": {"why": "test", "who": "me"},
        "training": {"learning_rate": 0.001, "steps": 3, "weight_decay": 0.0, "sample_prompts": []},
        "data": REQUEST["data"],
        "lora": {"r": 2, "dropout": 0.0},
        "adapter": "poet",
        "on_conflict": "wait",
    }
    assert await job_of(api, same) == first
    assert api.folder.job_ids() == [first]


@pytest.mark.parametrize("rows", [2, 20_000], ids=["small", "large"])
async def test_uploads_are_compared_by_their_content(api: Api, rows: int) -> None:
    def upload(last: str) -> aiohttp.FormData:
        lines = [json.dumps({"text": "the cat sat"})] * (rows - 1) + [json.dumps({"text": last})]
        return form({"adapter": "poet", "training": {"steps": 1}}, ("rows.jsonl", "\n".join(lines).encode()))

    first = await api.answered(202, "POST", "/finetune", data=upload("the dog ran"), headers=ONCE)
    status, again = await api.call("POST", "/finetune", data=upload("the dog ran"), headers=ONCE)
    assert (status, again["id"]) == (202, first["id"])
    error = await api.refused(
        422, "idempotency_mismatch", "POST", "/finetune", data=upload("the dog sat"), headers=ONCE
    )
    assert "another data;" in error["message"]
    assert list(api.folder.staging.iterdir()) == []
