"""kill -9 of the whole daemon in each phase of a document's job: it goes on at the item, and makes none twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.crash_oracle import curve_of
from tests.support.daemon_process import DaemonProcess, Died, Json
from tests.support.examples import in_turns

TEXT = (
    "The Orvane Bridge was opened in 1911 by Ludo Prast. It is 412 metres long. Its keeper lives under the north pier."
)
BODY: dict[str, Any] = {
    "adapter": "bridge",
    "document": {"text": TEXT, "questions_per_chunk": 6, "answer_tokens": 8, "replay": 0.4, "publish": "always"},
    "training": {"steps": 4, "checkpoint_steps": 2},
    "lora": {"r": 2},
}
DEATHS = ("document.questions=kill-group@4", "document.answers=kill-group@3", "finetune.mid_step=kill-group@3")
LAST = "document.evaluation=kill-group@12"


def kept(folder: Path) -> dict[str, list[Json]]:
    """The whole lines of each file of items; each item is there once."""
    found = dict[str, list[Any]]()
    for name in ("questions", "lessons", "scores"):
        file = folder / f"{name}.jsonl"
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        found[name] = [json.loads(line) for line in lines]
        keys = [each.get("key") or (each["chunk"], each["attempt"]) for each in found[name]]
        assert len(set(keys)) == len(keys), f"{name}: an item was made twice"
    return found


@pytest.mark.parametrize("recipe", in_turns(["topk_kd", "encoder", "cartridge"], days=6))
def test_a_job_goes_on_after_a_death_in_each_phase(tmp_path: Path, recipe: str) -> None:
    data, body = tmp_path / "data", BODY | {"document": BODY["document"] | {"recipe": recipe}}
    if recipe != "topk_kd":
        body["document"]["prefix_tokens"] = 8
    if recipe == "encoder":
        body["document"]["decoder_lora"] = True
    if recipe == "cartridge":
        del body["lora"]
    job: Json | None = None
    before = dict[str, list[Json]]()
    for failpoint in (*DEATHS, LAST):
        with DaemonProcess(Path("bundled"), data, failpoints=failpoint) as daemon:
            daemon.wait_ready()
            job = job or daemon.call("POST", "/finetune", body)[1]
            with pytest.raises(Died):
                list(daemon.events("GET", f"/finetune/{job['id']}/events"))
        found = kept(data / "jobs" / job["id"])
        for name, items in before.items():
            assert found[name][: len(items)] == items, f"{name}: what was there is there"
        before = found
    assert job is not None
    assert before["questions"]
    assert before["lessons"]
    with DaemonProcess(Path("bundled"), data) as daemon:
        daemon.wait_ready()
        events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
        _, ended = daemon.call("GET", f"/finetune/{job['id']}")
        assert daemon.stop() == 0
    assert ended["state"] == "succeeded", ended["error"]
    assert ended["document"]["evaluation"]["in_context"]["exact_match"] == 1
    assert sorted(curve_of(events)) == [1, 2, 3, 4]
    assert not (data / "jobs" / job["id"]).exists()
