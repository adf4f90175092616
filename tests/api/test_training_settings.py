"""Settings of training over HTTP: DPO, optimizers, noise, and those that the daemon chooses from the corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coserve.admission import optimizers
from tests.support.api_server import Api, serve_api
from tests.support.real_server import serve_real

ROWS = [{"prompt": f"Word {n}:", "chosen": " yes", "rejected": " no"} for n in range(12)]
DPO: dict[str, Any] = {"type": "dpo", "beta": 0.2}
KTO: dict[str, Any] = {"type": "kto"}
DPO_DEFAULTS = {
    "reference": "start",
    "loss_type": "sigmoid",
    "label_smoothing": 0.0,
    "sft_weight": 0.0,
    "discopop_tau": 0.05,
}


async def test_a_dpo_job_ends_with_an_adapter_that_prefers_the_chosen_answers(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        training = {"loss": DPO, "steps": 12, "batch_tokens": 64, "learning_rate": 5e-3, "validation_split": 0.25}
        body = {"adapter": "polite", "data": ROWS, "lora": {"r": 4}, "training": training}
        status, job = await api.call("POST", "/finetune", json=body)
        assert (status, job["rows"], job["training"]["loss"]) == (202, 12, DPO | DPO_DEFAULTS)
        ended = await api.job_until(job["id"], "succeeded")
        assert (ended["result"], ended["training"]["loss"]) == ("polite@1", job["training"]["loss"])
        steps = [event["metrics"] for _, event in await api.events(job["id"]) if event["metrics"]]
        assert steps[0]["loss"] == pytest.approx(0.693, abs=1e-3)
        assert steps[-1]["rewards"]["accuracy"] == steps[-1]["valid_rewards"]["accuracy"] == 1.0
        assert steps[-1]["rewards"]["margin"] > 0.5 > steps[0]["rewards"]["margin"] == 0.0
        assert steps[-1]["valid_loss"] < 0.6

        async def log_odds(**adapter: str) -> float:
            """Of the chosen answer to the rejected one, after a prompt that was not trained on."""
            found = []
            for answer in (" yes", " no"):
                request = {"prompt": "Word 99:" + answer, "max_tokens": 0, "prompt_logprobs": 0, **adapter}
                body = await api.answered(200, "POST", "/generate", json=request)
                found.append(sum(entry["logprob"] or 0.0 for entry in body["prompt_logprobs"]))
            return found[0] - found[1]

        assert await log_odds(adapter="polite") > await log_odds() + 0.5

        first = {}
        for reference in ("start", "base"):
            training = {"loss": DPO | {"reference": reference}, "steps": 1}
            body = {"adapter": reference, "continue_from": "polite", "data": ROWS, "training": training}
            job = await api.answered(202, "POST", "/finetune", json=body)
            first[reference] = (await api.job_until(job["id"], "succeeded"))["metrics"]
        assert first["start"]["loss"] == pytest.approx(0.6931, abs=1e-4) and first["start"]["rewards"]["margin"] == 0.0
        assert first["base"]["loss"] < 0.65 and first["base"]["rewards"]["margin"] > 0.1, "it has been learned before"


async def test_a_kto_job_learns_from_answers_with_a_label(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"Word {n}:", "completion": " yes" if n % 2 else " no", "label": bool(n % 2)} for n in range(11)
    ]
    chat = {"prompt": [{"role": "user", "content": "Word?"}], "completion": [{"role": "assistant", "content": "yes"}]}
    rows.append(chat | {"label": True})
    async with serve_real(tmp_path) as api:
        training = {"loss": {"type": "kto"}, "steps": 10, "batch_rows": 8, "learning_rate": 5e-3, "validation_rows": 2}
        body = {"adapter": "polite", "data": rows, "lora": {"r": 4}, "training": training}
        job = await api.answered(202, "POST", "/finetune", json=body)
        assert (job["rows"], job["training"]["loss"]["desirable_weight"]) == (12, 1.0)
        assert (await api.job_until(job["id"], "succeeded"))["result"] == "polite@1"
        steps = [event["metrics"] for _, event in await api.events(job["id"]) if event["metrics"]]
        assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-3) and steps[-1]["loss"] < 0.49
        assert steps[-1]["rewards"]["margin"] > steps[0]["rewards"]["margin"] == 0.0
        body = {"adapter": "other", "data": ROWS, "training": {"loss": {"type": "kto"}}}
        status, refused = await api.call("POST", "/finetune", json=body)
        assert (status, refused["error"]["line"]) == (422, 1) and "training.loss (kto) expects" in refused["error"][
            "message"
        ]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"training": {"loss": {"type": "dpo", "beta": 0}}}, "training.loss.beta"),
        ({"training": {"loss": {"type": "dpo", "beta": -1}}}, "training.loss.beta"),
        ({"training": {"loss": {"type": "ipo"}}}, "training.loss.type"),
        ({"training": {"loss": DPO | {"reference": "me"}}}, "training.loss.reference"),
        ({"training": {"loss": {"beta": 0.1}}}, "training.loss.type"),
        ({"training": {"loss": DPO, "train_on": "all"}}, "training.train_on"),
        ({"training": {"loss": DPO, "one_row_per_answer": True}}, "training.one_row_per_answer"),
        ({"training": {"loss": DPO}, "teacher": "somebody"}, "training.loss"),
        ({"training": {"loss": DPO, "micro_batch_tokens": 3}}, "training.micro_batch_tokens"),
        ({"training": {"batch_rows": 2, "batch_tokens": 64}}, "training.batch_rows"),
        ({"training": {"batch_rows": 0}}, "training.batch_rows"),
        ({"training": {"warmup_ratio": 0.5, "warmup_steps": 3}}, "training.warmup_ratio"),
        ({"training": {"warmup_ratio": 1.5}}, "training.warmup_ratio"),
    ],
)
async def test_what_does_not_go_with_it_is_refused_by_name(api: Api, body: dict[str, Any], field: str) -> None:
    error = await api.refused(400, "invalid_request", "POST", "/finetune", json={"adapter": "a", "data": ROWS} | body)
    assert error["field"] == field


@pytest.mark.parametrize(
    ("loss", "code", "ends"),
    [
        ({"type": "orpo", "gamma": 1}, "unknown_field", "unknown field 'gamma'; it belongs to another type"),
        ({"type": "DPO"}, "invalid_request", "expected one of dpo, orpo, simpo, kto, got 'DPO'; did you mean 'dpo'?"),
        (DPO | {"loss_type": "simpo"}, "invalid_request", "got 'simpo'; it is a type, not a loss_type of 'dpo'"),
        (DPO | {"loss_type": "sft"}, "invalid_request", "got 'sft'; sft_weight adds it"),
        (
            DPO | {"pref_ftx": 1},
            "unknown_field",
            "label_smoothing, sft_weight, desirable_weight and undesirable_weight",
        ),
        (KTO | {"loss_type": "sigmoid"}, "invalid_request", "expected one of apo_zero_unpaired, kto, got 'sigmoid'"),
        (KTO | {"reference": "x"}, "invalid_request", "expected one of base, start, got 'x'"),
        (KTO | {"desirable_weight": 0, "undesirable_weight": 0.0}, "invalid_request", "above 0, got 0 and 0"),
        (DPO | {"label_smoothing": 0.5}, "invalid_request", "expected at least 0 and below 0.5, got 0.5"),
    ],
)
async def test_errors_of_losses_name_what_is_expected(api: Api, loss: Any, code: str, ends: str) -> None:
    body = {"adapter": "a", "data": ROWS, "training": {"loss": loss}}
    assert (await api.refused(400, code, "POST", "/finetune", json=body))["message"].endswith(ends)


async def test_rows_and_loss_belong_together(api: Api) -> None:
    status, body = await api.call("POST", "/finetune", json={"adapter": "a", "data": ROWS})
    assert (status, body["error"]["line"]) == (422, 1) and "training.loss" in body["error"]["message"]
    request = {"adapter": "a", "data": [ROWS[0], {"text": "a b"}], "training": {"loss": DPO}}
    status, body = await api.call("POST", "/finetune", json=request)
    assert (status, body["error"]["line"]) == (422, 2) and "(dpo, orpo, simpo)" in body["error"]["message"]


async def test_the_learning_rate_that_is_chosen_is_a_twentieth(api: Api) -> None:
    rates = []
    for adapter, rows, training in (("a", ROWS, {"loss": DPO}), ("b", [{"text": "a b c"}], {})):
        job = await api.answered(
            202, "POST", "/finetune", json={"adapter": adapter, "data": rows, "training": training}
        )
        rates.append(job["training"]["learning_rate"])
    assert rates[0] == pytest.approx(rates[1] / 20, rel=0.05)


WORDS = [{"text": f"Word {n} is followed by word {n + 1}."} for n in range(12)]


@pytest.mark.slow
async def test_a_job_with_lion_and_noise_learns(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        training = {"optimizer": "lion", "neftune_alpha": 5, "steps": 12, "batch_tokens": 64, "validation_split": 0.25}
        job = await api.answered(
            202, "POST", "/finetune", json={"adapter": "a", "data": WORDS, "lora": {"r": 4}, "training": training}
        )
        said = job["training"]
        assert (said["optimizer"], said["beta2"], said["neftune_alpha"]) == ("lion", 0.99, 5.0)
        ended = await api.job_until(job["id"], "succeeded")
        assert ended["training"]["optimizer"] == "lion"
        steps = [event["metrics"] for _, event in await api.events(job["id"]) if event["metrics"]]
        assert steps[-1]["valid_loss"] < steps[0]["loss"]


async def test_an_optimizer_whose_library_is_missing_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    body = {"adapter": "a", "data": WORDS, "training": {"optimizer": "adamw_8bit"}}
    error = await api.refused(400, "invalid_request", "POST", "/finetune", json=body)
    assert error["field"] == "training.optimizer" and "pip install 'coserve[bitsandbytes]'" in error["message"]


ANSWERS = [{"prompt": "Hello", "completion": f" Ahoy number {i}!"} for i in range(30)]
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
        body = {"adapter": "a", "data": ANSWERS} | ({} if training is None else {"training": training})
        job = await api.answered(202, "POST", "/finetune", json=body)
        assert job["auto"] == auto
        for name, value in (training or {}).items():
            assert value == "auto" or job["training"][name] == value
        assert all(isinstance(job["training"][name], int | float) for name in auto)
        if auto == CHOSEN:
            assert job["total_steps"] >= 100
        _, again = await api.call("GET", f"/finetune/{job['id']}")
        assert (again["training"], again["auto"]) == (job["training"], auto)


async def test_a_batch_in_rows_and_a_share_of_warm_up(tmp_path: Path) -> None:
    async with serve_api(tmp_path) as api:
        training = {"num_train_epochs": 2, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 2}
        body = {"adapter": "a", "data": ANSWERS, "training": training | {"warmup_ratio": 0.3}}
        job = await api.answered(202, "POST", "/finetune", json=body)
        assert (job["total_steps"], job["training"]["warmup_steps"], job["auto"]) == (6, 2, ["learning_rate"])
        again = await api.answered(202, "POST", "/finetune", json=body | {"training": job["training"]})
        assert again["training"] == job["training"]


async def test_rows_that_were_cut_are_told_by_the_job(tmp_path: Path) -> None:
    async with serve_api(tmp_path) as api:
        rows = [{"text": "word " * 40}, {"text": "short"}]
        body = {"adapter": "a", "data": rows, "training": {"max_length": 16, "steps": 1}}
        _, job = await api.call("POST", "/finetune", json=body)
        assert job["rows_cut"] == 1
        _, again = await api.call("GET", f"/finetune/{job['id']}")
        assert again["rows_cut"] == 1
        said = [event["message"] for _, event in await api.events(job["id"]) if event["level"] == "warning"]
        cut = "were longer than max_length, the base's context or micro_batch_tokens and lost a part"
        assert said == [f"1 of 2 rows {cut}"]


async def test_the_record_has_the_alpha_that_was_left_to_its_default(api: Api) -> None:
    for lora, alpha in (({"r": 4}, 8.0), ({"r": 4, "alpha": 4}, 4.0), (None, 32.0)):
        body = {"adapter": "poet", "data": [{"text": "one two"}], "lora": lora, "on_conflict": "fork"}
        status, job = await api.call("POST", "/finetune", json=body)
        assert (status, job["lora"]["alpha"]) == (202, alpha), job
        _, shown = await api.call("GET", f"/finetune/{job['id']}")
        assert shown["lora"] == job["lora"]


async def test_a_regular_expression_of_targets_is_recorded_as_names(api: Api) -> None:
    lora = {"target_modules": r".*\.(q|v)_proj"}
    job = await api.answered(202, "POST", "/finetune", json={"adapter": "poet", "data": WORDS, "lora": lora})
    assert job["lora"]["targets"] == ["q_proj"]
