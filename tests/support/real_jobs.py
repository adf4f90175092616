"""Jobs and answers of a real server on the bundled base."""

from __future__ import annotations

from typing import Any

from tests.support.api_server import Api


async def train(api: Api, name: str, **settings: object) -> dict[str, Any]:
    """The job, succeeded."""
    training = {"steps": 4, "batch_tokens": 64, "learning_rate": 0.02}
    body = {"adapter": name, "data": [{"prompt": "Today we", "completion": " sighted land."}], "training": training}
    job = await api.answered(202, "POST", "/finetune", json=body | settings)
    return await api.job_until(job["id"], "succeeded")


async def text(api: Api, adapter: str | None) -> str:
    body = {"prompt": "Today we", "max_tokens": 8, "temperature": 0, "adapter": adapter}
    answer = await api.answered(200, "POST", "/generate", json=body)
    found: str = answer["choices"][0]["text"]
    return found
