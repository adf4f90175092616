"""What a user leaves out of `training` is chosen from the corpus, and the job says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.api_server import Api, serve_api

ROWS = [{"prompt": "Hello", "completion": f" Ahoy number {i}!"} for i in range(30)]
CHOSEN = ["batch_tokens", "epochs", "learning_rate"]


@pytest.mark.parametrize(
    ("training", "auto"),
    [
        (None, CHOSEN),
        ({"epochs": "auto", "batch_tokens": "auto", "learning_rate": "auto"}, CHOSEN),
        ({"epochs": 2}, ["batch_tokens", "learning_rate"]),
        ({"steps": 5, "learning_rate": 1e-3}, ["batch_tokens"]),
        ({"epochs": 1, "batch_tokens": 50, "learning_rate": 1e-3}, []),
    ],
)
async def test_the_job_tells_what_was_chosen(tmp_path: Path, training: dict[str, Any] | None, auto: list[str]) -> None:
    async with serve_api(tmp_path) as api:
        body = {"adapter": "a", "data": ROWS} | ({} if training is None else {"training": training})
        status, job = await api.call("POST", "/finetune", json=body)
        assert status in (200, 201, 202), job
        assert job["auto"] == auto
        for name, value in (training or {}).items():
            assert value == "auto" or job["training"][name] == value
        assert all(isinstance(job["training"][name], int | float) for name in auto)
        if auto == CHOSEN:
            assert job["total_steps"] >= 100
        _, again = await api.call("GET", f"/finetune/{job['id']}")
        assert (again["training"], again["auto"]) == (job["training"], auto)


async def test_another_word_than_auto_is_refused(tmp_path: Path) -> None:
    async with serve_api(tmp_path) as api:
        body = {"adapter": "a", "data": ROWS, "training": {"learning_rate": "fast"}}
        error = await api.refused(400, "invalid_request", "POST", "/finetune", json=body)
        assert error["field"] == "training.learning_rate"
        assert "a number" in error["message"] and "auto" in error["message"]


async def test_rows_that_were_cut_are_told_by_the_job(tmp_path: Path) -> None:
    async with serve_api(tmp_path) as api:
        rows = [{"text": "word " * 40}, {"text": "short"}]
        body = {"adapter": "a", "data": rows, "training": {"max_length": 16, "steps": 1}}
        _, job = await api.call("POST", "/finetune", json=body)
        assert job["rows_cut"] == 1
        _, again = await api.call("GET", f"/finetune/{job['id']}")
        assert again["rows_cut"] == 1


async def test_the_record_has_the_alpha_that_was_left_to_its_default(api: Api) -> None:
    for lora, alpha in (({"r": 4}, 8.0), ({"r": 4, "alpha": 4}, 4.0), (None, 32.0)):
        body = {"adapter": "poet", "data": [{"text": "one two"}], "lora": lora, "on_conflict": "fork"}
        status, job = await api.call("POST", "/finetune", json=body)
        assert (status, job["lora"]["alpha"]) == (202, alpha), job
        _, shown = await api.call("GET", f"/finetune/{job['id']}")
        assert shown["lora"] == job["lora"]
