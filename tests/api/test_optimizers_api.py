"""Optimizers over HTTP: a job with Lion and NEFTune on the bundled base, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coserve.admission import optimizers
from tests.support.api_server import Api
from tests.support.real_server import serve_real

ROWS = [{"text": f"Word {n} is followed by word {n + 1}."} for n in range(12)]


@pytest.mark.slow
async def test_a_job_with_lion_and_noise_learns(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        training = {"optimizer": "lion", "neftune_alpha": 5, "steps": 12, "batch_tokens": 64, "validation_split": 0.25}
        job = await api.answered(
            202, "POST", "/finetune", json={"adapter": "a", "data": ROWS, "lora": {"r": 4}, "training": training}
        )
        said = job["training"]
        assert (said["optimizer"], said["beta2"], said["neftune_alpha"]) == ("lion", 0.99, 5.0)
        ended = await api.job_until(job["id"], "succeeded")
        assert ended["training"]["optimizer"] == "lion"
        steps = [event["metrics"] for _, event in await api.events(job["id"]) if event["metrics"]]
        assert steps[-1]["valid_loss"] < steps[0]["loss"]


@pytest.mark.parametrize(
    ("training", "field", "says"),
    [
        ({"optimizer": "adamw_8bit"}, "optimizer", "pip install 'coserve[bitsandbytes]'"),
        ({"optimizer": "adamw_torch"}, "optimizer", "did you mean 'adamw'?"),
        ({"optimizer": "paged_lion_8bit"}, "optimizer", "paged_lion_8bit needs bitsandbytes"),
        ({"optimizer": "paged_adamw_32bit"}, "optimizer", "did you mean 'paged_adamw'?"),
        ({"optimizer": "lion", "eps": 1e-6}, "eps", "expected no eps with lion"),
        ({"neftune_alpha": -1}, "neftune_alpha", "expected above 0"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    api: Api, monkeypatch: pytest.MonkeyPatch, training: dict[str, Any], field: str, says: str
) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    body = {"adapter": "a", "data": ROWS, "training": training}
    error = await api.refused(400, "invalid_request", "POST", "/finetune", json=body)
    assert error["field"] == f"training.{field}" and says in error["message"]
