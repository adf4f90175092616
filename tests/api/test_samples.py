"""Samples of the adapter in training, over the real engine: what they say, and that they change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coserve.core.link.generation import Generate
from tests.support.api_server import Api
from tests.support.crash_oracle import ROWS, curve_of, digest
from tests.support.examples import by_day
from tests.support.real_server import serve_real

PROMPTS: list[Any] = ["The quick", [{"role": "user", "content": "Hello"}]]
TRAINING = {"steps": 5, "batch_tokens": 64, "max_length": 64, "checkpoint_steps": 2, "learning_rate": 0.02, "seed": 3}
SAMPLING = {"sample_prompts": PROMPTS, "sample_steps": 2, "sample_max_tokens": 8}


async def train(api: Api, adapter: str, **training: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A job at its end, and its events."""
    body = {"adapter": adapter, "data": ROWS, "lora": {"r": 2}, "training": TRAINING | training}
    job = await api.answered(202, "POST", "/finetune", json=body)
    events = [event for _, event in await api.events(job["id"])]
    assert events[-1]["state"] == "succeeded", events
    _, job = await api.call("GET", f"/finetune/{job['id']}")
    return job, events


def samples(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["sample"] for event in events if event["type"] == "sample"]


async def greedy(api: Api, adapter: str) -> list[tuple[str, str]]:
    """What the published adapter generates of the prompts."""
    found = []
    for prompt in PROMPTS:
        named = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        body = named | {"adapter": adapter, "temperature": 0, "max_tokens": 8}
        answer = await api.answered(200, "POST", "/generate", json=body)
        choice = answer["choices"][0]
        found.append((choice["text"], choice["finish_reason"]))
    return found


async def test_samples_come_every_k_steps_and_change_no_number(tmp_path: Path) -> None:
    async with serve_real(tmp_path) as api:
        plain, without = await train(api, "plain")
        sampled, events = await train(api, "sampled", **SAMPLING)
        assert curve_of(events) == curve_of(without)
        files = [api.folder.root / "adapters" / name / "1" for name in ("plain", "sampled")]
        assert digest(files[0]) == digest(files[1])

        found = samples(events)
        assert sorted((each["step"], each["prompt"]) for each in found) == [(s, p) for s in (2, 4, 5) for p in (0, 1)]
        for step, last in ((2, 4), (4, 5)):  # a job waits for its samples where the next ones are due
            of_step = [event["seq"] for event in events if (event["sample"] or {}).get("step") == step]
            (done,) = (e["seq"] for e in events if e["type"] == "metrics" and e["metrics"]["step"] == step)
            (later,) = (e["seq"] for e in events if e["type"] == "metrics" and e["metrics"]["step"] == last)
            assert all(done < seq for seq in of_step), (done, of_step, later)
        final = [(each["text"], each["finish_reason"]) for each in sampled["samples"]]
        assert final == await greedy(api, "sampled@1") == await greedy(api, "plain@1")
        assert sampled["samples"] == sorted((s for s in found if s["step"] == 5), key=lambda each: each["prompt"])
        assert len({each["text"] for each in found if each["prompt"] == 0}) > 1, "the samples show what was learned"
        assert plain["samples"] == []

        status, body = await api.call("GET", "/adapters")
        assert (status, sorted(each["id"] for each in body["data"])) == (200, ["plain", "sampled"])


@pytest.mark.slow
async def test_the_last_samples_are_of_the_weights_that_are_published(tmp_path: Path) -> None:
    """With early stopping they are not those of the last step."""
    stopping = {
        "validation_split": 0.3,
        "early_stopping_patience": 1,
        "eval_steps": 1,
        "learning_rate": 0.5,
        "steps": 8,
    }
    async with serve_real(tmp_path) as api:
        job, _ = await train(api, "early", **SAMPLING | stopping)
        assert job["step"] < 8
        assert {each["step"] for each in job["samples"]} == {job["step"]}
        assert [(each["text"], each["finish_reason"]) for each in job["samples"]] == await greedy(api, "early@1")


async def test_samples_are_of_the_class_batch_and_of_an_adapter_that_no_user_can_name(tmp_path: Path) -> None:
    async with serve_real(tmp_path, shed="all") as api:
        sent: list[Generate] = []
        send = api.service.engine.send

        def spy(message: Any) -> None:
            if isinstance(message, Generate):
                sent.append(message)
            send(message)

        api.service.engine.send = spy  # type: ignore[method-assign]
        await train(api, "a", **SAMPLING | {"steps": 1})
        assert len(sent) == 2 and all(each.slo.batch and not each.slo.shed for each in sent)
        (ref,) = {each.adapter for each in sent}
        assert ref is not None
        answer = await api.answered(400, "POST", "/generate", json={"prompt": "x", "adapter": str(ref)})
        assert answer["error"]["field"] == "adapter"


@pytest.mark.parametrize("temperature", by_day([0.0, 1.0], 1.0))
async def test_the_same_job_has_the_same_samples(tmp_path: Path, temperature: float) -> None:
    async with serve_real(tmp_path) as api:
        first, second = [
            await train(api, name, **SAMPLING | {"sample_temperature": temperature, "steps": 2}) for name in "ab"
        ]
        assert first[0]["samples"] == second[0]["samples"]
