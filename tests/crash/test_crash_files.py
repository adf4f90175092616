"""kill -9 around uploads: an acknowledged file outlives the daemon, one that was not leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.crash_oracle import ROWS
from tests.support.daemon_process import DaemonProcess

openai = pytest.importorskip("openai")


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
