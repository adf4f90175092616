"""What the API process does with a job's snapshots, over a fake engine: each prompt once at each step, and nothing
after the job's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coserve.core.errors import Overloaded
from coserve.core.link.generation import CancelRequest, Generate, RequestFailed
from coserve.core.link.jobs import JobCancelled, JobProgress, JobSnapshot, JobStarted, JobSucceeded, SnapshotDone
from coserve.core.link.link import ToEngine
from coserve.core.training.jobs import JobSpec
from coserve.core.types import AdapterRef
from tests.support.api_server import REPLY, Api, serve_api
from tests.support.fake_engine import FakeEngine, metrics

ROWS = [{"text": "one two three"}, {"prompt": "a", "completion": "b"}]
SAMPLING = {"sample_prompts": ["x", [{"role": "user", "content": "y"}]], "sample_steps": 2, "sample_max_tokens": 64}


class SamplingEngine(FakeEngine):
    """It has a snapshot after step 2, and goes on when the snapshot is not needed any more."""

    def handle(self, message: ToEngine) -> None:
        if isinstance(message, SnapshotDone):
            self.done.set()
        else:
            super().handle(message)

    async def _train(self, spec: JobSpec) -> None:
        self.done = asyncio.Event()
        self.link.send(JobStarted(id=spec.id, total_steps=self.steps))
        for step in (1, 2):
            self.link.send(JobProgress(id=spec.id, metrics=metrics(step, self.steps)))
        self.link.send(JobSnapshot(id=spec.id, step=2, ref=AdapterRef(f"{spec.id}:snapshot", 1)))
        await self.done.wait()
        await self.go_jobs.wait()
        ref = AdapterRef(spec.adapter, spec.version)
        self.write_adapter(self.folder.adapter(ref), self.base)
        self.link.send(JobSucceeded(id=spec.id, ref=ref))


@pytest.fixture
async def sampling(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve_api(tmp_path, engine_type=SamplingEngine) as api:
        yield api


async def submit(api: Api, **training: Any) -> tuple[int, Any]:
    return await api.call("POST", "/finetune", json={"adapter": "a", "data": ROWS, "training": SAMPLING | training})


async def started(api: Api, **training: Any) -> str:
    status, job = await submit(api, **training)
    assert status == 202, job
    return str(job["id"])


def samples(events: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [event["sample"] for _, event in events if event["type"] == "sample"]


async def test_samples_are_events_and_the_job_shows_the_last_ones(sampling: Api) -> None:
    id = await started(sampling)
    events = await sampling.events(id)
    assert [event["type"] for _, event in events][-3:] == ["sample", "sample", "state"]
    found = samples(events)
    expected = [{"step": 2, "prompt": p, "text": REPLY, "finish_reason": "length"} for p in (0, 1)]
    assert sorted(found, key=lambda each: each["prompt"]) == expected
    _, job = await sampling.call("GET", f"/finetune/{id}")
    assert job["samples"] == expected
    assert job["training"]["sample_prompts"] == ["x", [{"role": "user", "content": "y"}]]
    asked = sampling.engine.heard(Generate)
    assert [message.sampling.temperature for message in asked] == [0.0, 0.0]


async def test_a_step_that_runs_again_leaves_its_samples_out(sampling: Api) -> None:
    """The engine died before it heard that the samples were there."""
    sampling.engine.go_jobs.clear()
    id = await started(sampling)
    await sampling.engine.saw(SnapshotDone)
    await sampling.settled()
    await sampling.engine.die()
    await sampling.service.disconnected()
    await sampling.start_engine()
    await sampling.engine.saw(SnapshotDone)
    assert not sampling.engine.heard(Generate)
    assert len(samples(await sampling.events(id))) == 2


async def test_samples_that_an_engine_took_with_it_are_made_by_the_next_one(sampling: Api) -> None:
    sampling.engine.go_requests.clear()
    id = await started(sampling)
    await sampling.engine.saw(Generate, 2)
    await sampling.engine.die()
    await sampling.service.disconnected()
    await sampling.start_engine()
    found = await sampling.events(id)
    assert sorted(each["prompt"] for each in samples(found)) == [0, 1]
    assert not [event for _, event in found if event["type"] == "message"], "nothing is wrong with the job"


@pytest.mark.parametrize("ending", ["cancel", "pause"])
async def test_a_job_that_ends_takes_its_samples_with_it(sampling: Api, ending: str) -> None:
    sampling.engine.go_requests.clear()
    id = await started(sampling)
    await sampling.engine.saw(Generate, 2)
    status, job = await sampling.call("POST", f"/finetune/{id}/{ending}")
    assert (status, job["samples"]) == (200, [])
    await sampling.engine.saw(CancelRequest, 2)
    await sampling.engine.saw(SnapshotDone)
    sampling.engine.go_requests.set()
    if ending == "pause":
        await sampling.call("POST", f"/finetune/{id}/resume")
    found = samples(await sampling.events(id))
    assert sorted(each["prompt"] for each in found) == ([] if ending == "cancel" else [0, 1])


async def test_a_snapshot_whose_job_ends_at_once_is_given_back(sampling: Api) -> None:
    """Else the engine would keep it for ever."""
    sampling.engine.go_requests.clear()
    id = await started(sampling)
    await sampling.engine.saw(Generate, 2)
    ref = AdapterRef(f"{id}:snapshot", 2)
    sampling.engine.link.send(JobSnapshot(id=id, step=4, ref=ref))
    sampling.engine.link.send(JobCancelled(id=id))
    done = await sampling.engine.saw(SnapshotDone, 2)
    assert ref in [message.ref for message in done]


async def test_samples_that_a_stop_ends_are_left_to_the_next_start(sampling: Api) -> None:
    """The engine waits for them: were it told that they are done, it might publish the adapter without them."""
    sampling.engine.go_requests.clear()
    await started(sampling)
    await sampling.engine.saw(Generate, 2)
    sampling.service.stop()
    await sampling.answered(503, "POST", "/generate", json={"prompt": "x"})  # what was in flight has ended, too
    assert not sampling.engine.heard(SnapshotDone)


async def test_a_sample_that_fails_is_a_note_and_the_job_goes_on(sampling: Api) -> None:
    why = RequestFailed(id="", code=Overloaded.code, message="too much to do")
    sampling.engine.fail_requests = why
    id = await started(sampling)
    events = await sampling.events(id)
    notes = sorted(event["message"] for _, event in events if event["level"] == "warning")
    assert notes == [f"no sample of prompt {p} at step 2: too much to do" for p in (0, 1)]
    assert (events[-1][1]["state"], samples(events)) == ("succeeded", [])


async def test_what_cannot_be_sampled_is_refused(sampling: Api) -> None:
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"sample_prompts": ["a"] * 9}, "sample_prompts", "at most 8"),
        ({"sample_prompts": ["a" * 8193]}, "sample_prompts", "8192 characters"),
        ({"sample_prompts": ["fine", "word " * 400]}, "sample_prompts", "prompt 1: "),
        ({"sample_prompts": ["fine", ""]}, "sample_prompts", "prompt 1: "),
        ({"sample_prompts": [[]]}, "sample_prompts", "at least one message"),
        (
            {"sample_prompts": [[{"role": "boss", "content": "x"}]]},
            "sample_prompts",
            "one of assistant, developer, system, tool, user",
        ),
        ({"sample_prompts": "a"}, "sample_prompts", ""),
        ({"sample_steps": 0}, "sample_steps", "at least 1"),
        ({"sample_max_tokens": 0}, "sample_max_tokens", "expected 1 to 1024"),
        ({"sample_max_tokens": 1025}, "sample_max_tokens", "expected 1 to 1024"),
        ({"sample_max_tokens": 200}, "sample_max_tokens", "the context, 128"),
        ({"sample_temperature": -1}, "sample_temperature", "expected 0 to 100"),
    ]
    for training, field, words in wrong:
        status, body = await submit(sampling, **training)
        assert (status, body["error"]["code"]) == (400, "invalid_request"), body
        assert body["error"]["field"].startswith(f"training.{field}"), body
        assert words in body["error"]["message"], body
