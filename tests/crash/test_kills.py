"""kill -9 of the daemon, or of its engine alone: jobs go on, samples are made once, acknowledged files stay."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.crash_oracle import ROWS, STEPS, Reference, Restarted, curve_of, digest, job_request
from tests.support.daemon_process import DaemonProcess, Died, Json
from tests.support.examples import in_turns, on_days


def test_an_engine_that_is_killed_goes_on_from_the_last_checkpoint(restarted: Restarted) -> None:
    """The daemon starts it again, ends the job and serves as if nothing had happened."""
    oracle, reference = restarted.oracle, restarted.oracle.reference
    assert restarted.restarts == [0, 1]
    assert restarted.events[-1]["state"] == "succeeded", restarted.events[-1]
    assert curve_of(restarted.events) == reference.curve
    assert len(reference.curve) == STEPS
    assert restarted.text == reference.text
    oracle.check_dead()
    oracle.check_tidy()


openai = pytest.importorskip("openai")


@pytest.mark.slow
def test_files_outlive_the_daemon(model: Path, tmp_path: Path) -> None:
    data, content = tmp_path / "data", "\n".join(map(json.dumps, ROWS)).encode()
    with DaemonProcess(model, data, failpoints="file.before_rename=kill-group@2") as daemon:
        daemon.wait_ready()
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            kept = client.files.create(file=("rows.jsonl", content), purpose="fine-tune")
            with pytest.raises(openai.APIConnectionError):
                client.files.create(file=("lost.jsonl", content), purpose="fine-tune")
        assert daemon.wait() == -9
    with DaemonProcess(model, data, options=("--served-model-name", "support")) as daemon:
        daemon.wait_ready()
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            assert client.files.list().data == [kept]
            assert client.files.content(kept.id).content == content
            assert client.models.list().data[0].id == "support"
            job = client.fine_tuning.jobs.create(
                model="support", training_file=kept.id, hyperparameters={"n_epochs": 1}
            )
            events = list(daemon.events("GET", f"/finetune/{job.id}/events"))
            assert events[-1]["state"] == "succeeded", events[-1]
            trained = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
            assert trained is not None and trained.startswith("ft:support:")
            assert client.completions.create(model=trained, prompt="x", max_tokens=1).model == trained
        assert [entry.name for entry in (data / "files").iterdir()] == [kept.id]
        assert daemon.stop() == 0


DEATHS = {
    "before the earlier job's end is committed": "adapter.publish=kill-group",
    # Both jobs, a start, six steps, two checkpoints, the end.
    "after it": "registry.after_commit=kill-group@12",
}


@pytest.mark.parametrize("rule", in_turns(DEATHS, days=2))
def test_a_waiting_job_outlives_the_daemon(model: Path, tmp_path: Path, rule: str) -> None:
    data = tmp_path / "data"
    slowly = "finetune.mid_step=delay:0.5s"  # the second job comes before the first one ends
    with DaemonProcess(model, data, failpoints=f"{slowly};{rule}") as daemon:
        daemon.wait_ready()
        request = job_request("poet")
        _, first = daemon.call("POST", "/finetune", request)
        del request["lora"]
        _, second = daemon.call("POST", "/finetune", request | {"continue_from": "poet"})
        assert first["id"] in second["waiting"]
        with pytest.raises(Died):
            for _ in daemon.events("GET", f"/finetune/{second['id']}/events"):
                pass
        assert daemon.wait() == -9
    with DaemonProcess(model, data) as daemon:
        daemon.wait_ready()
        events = list(daemon.events("GET", f"/finetune/{second['id']}/events"))
        assert events[-1]["state"] == "succeeded", events[-1]
        assert "continues from poet@1" in [event["message"] for event in events]
        _, done = daemon.call("GET", f"/finetune/{second['id']}")
        assert (done["result"], done["continue_from"], done["waiting"]) == ("poet@2", "poet@1", None)
        assert daemon.stop() == 0


SAMPLING = {"sample_prompts": ["The quick", "The line"], "sample_steps": 2, "sample_max_tokens": 8}


@on_days(1)
def test_samples_of_a_killed_daemon_are_made_once(model: Path, reference: Reference, tmp_path: Path) -> None:
    """At step 2, before which there is no checkpoint, and at step 4."""
    data = tmp_path / "data"
    body = job_request("adapter")
    body["training"] |= SAMPLING
    job: Json | None = None
    for hit in (3, 14):
        with DaemonProcess(model, data, failpoints=f"generate.mid_stream=kill-group@{hit}") as daemon:
            daemon.wait_ready()
            job = job or daemon.call("POST", "/finetune", body)[1]
            with pytest.raises(Died):
                list(daemon.events("GET", f"/finetune/{job['id']}/events"))
    assert job is not None
    with DaemonProcess(model, data) as daemon:
        daemon.wait_ready()
        events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
        _, job = daemon.call("GET", f"/finetune/{job['id']}")
        asked = {"prompt": "The quick", "temperature": 0, "max_tokens": 8, "adapter": "adapter@1"}
        _, generated = daemon.call("POST", "/generate", asked)
        assert daemon.stop() == 0
    assert events[-1]["state"] == "succeeded", events[-1]
    found = Counter((e["sample"]["step"], e["sample"]["prompt"]) for e in events if e["type"] == "sample")
    assert found == {(step, prompt): 1 for step in range(2, STEPS + 1, 2) for prompt in (0, 1)}
    assert job["samples"][0]["text"] == generated["choices"][0]["text"]
    assert curve_of(events) == reference.curve
    assert digest(data / "adapters" / "adapter" / "1") == reference.digest
