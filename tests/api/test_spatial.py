"""Jobs over a real engine: side by side with generation, and in common batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from coserve.config import Config
from coserve.core.errors import ConfigError, StartupError
from coserve.engine.spatial.training_stream import make_training_stream
from coserve.queues.policies.choice import make_policy
from coserve.queues.policies.overlap import Overlap
from coserve.queues.policies.spatial import Spatial
from tests.support.api_server import Api
from tests.support.examples import by_day
from tests.support.held_device import HeldDevice
from tests.support.real_server import serve_real

JOB = {
    "adapter": "learned",
    "data": [{"text": "one two three four five six"}, {"text": "seven eight nine ten eleven"}] * 4,
    "lora": {"r": 4},
    "training": {"steps": 6, "batch_tokens": 32, "checkpoint_steps": 2, "validation_split": 0.25, "eval_steps": 3},
}


async def ask(api: Api, prompt: str) -> object:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    answer = await api.answered(200, "POST", "/generate", json=body)
    return answer["choices"][0]["token_ids"]


@pytest.mark.parametrize("beside", by_day(["spatial", "overlap"], "overlap"))
async def test_jobs_and_requests_get_what_they_get_in_turns(tmp_path: Path, beside: str) -> None:
    prompts = [f"Once upon a time there were {n}" for n in ("two", "three", "four", "five")]
    device, found = HeldDevice(seconds=0.002), []
    for policy in ("slack", beside):
        training = None if policy == "slack" else device.stream()
        async with serve_real(tmp_path / policy, training=training, policy=policy) as api:
            job = await api.answered(202, "POST", "/finetune", json=JOB)
            texts = [await ask(api, prompt) for prompt in prompts]
            ended = await api.job_until(job["id"], "succeeded")
            _, health = await api.call("GET", "/health")
            assert ("spatial: a stand-in" in str(health)) == (training is not None)
            found.append((texts, ended["metrics"] | {"seconds": 0, "tokens_per_second": 0}))
    assert all(each == found[0] for each in found)
    assert found[0][1]["valid_loss"] is not None and device.entered and device.marks


def test_training_beside_generation_needs_a_gpu_of_its_own() -> None:
    assert isinstance(make_policy(Config(policy="spatial")), Spatial)
    assert isinstance(make_policy(Config(policy="overlap")), Overlap)
    for policy in ("spatial", "overlap"):
        with pytest.raises(ConfigError, match=f"tp: expected 1 with policy '{policy}'"):
            Config(policy=policy, tp=2)
        with pytest.raises(StartupError, match=f"'{policy}' needs an NVIDIA GPU, and the base is on cpu"):
            make_training_stream(Config(policy=policy), torch.device("cpu"))
    for share in (0.0, 1.0):
        with pytest.raises(ConfigError, match="training_sm_share"):
            Config(training_sm_share=share)
    assert make_training_stream(Config(), torch.device("cpu")) is None


ROWS = [{"text": f"line {number} of a short song"} for number in range(6)]


async def test_three_jobs_train_together_and_each_tells_its_own_story(tmp_path: Path) -> None:
    async with serve_real(tmp_path, policy="ets") as api:
        jobs = []
        for number, rank in enumerate((2, 4, 8)):
            training = {"steps": 20 + number, "batch_tokens": 32, "seed": number}
            body = {"adapter": f"a{number}", "data": ROWS, "lora": {"r": rank}, "training": training}
            job = await api.answered(202, "POST", "/finetune", json=body)
            jobs.append(job["id"])
        await asyncio.gather(*(api.job_until(job, "succeeded") for job in jobs))
        for number, job in enumerate(jobs):
            steps = [event["metrics"]["step"] for _, event in await api.events(job) if event["metrics"]]
            assert steps == list(range(1, 21 + number))
        assert api.service.engine.stats is not None
        batches = api.service.engine.stats.batches
        assert batches.jobs > batches.count > 0, "they shared some"
