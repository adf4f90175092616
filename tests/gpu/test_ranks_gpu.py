"""A daemon on two, four and eight GPUs, with NCCL and CUDA graphs. Run with `pytest -m gpu` on a machine that has
them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.answers import GREEDY, PROMPTS, answers
from tests.support.crash_oracle import job_request
from tests.support.daemon_process import DaemonProcess

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("tp", "compile"), [(2, "on"), (2, "off"), (4, "on"), (8, "on")])
def test_texts_and_losses_on_several_gpus_are_those_of_one(tmp_path: Path, tp: int, compile: str) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    options = ("--device", "cuda", "--compile", compile, "--kv-tokens", "16384")  # other tests use the same GPU
    alone, together = (answers(tmp_path / str(size), "--tp", str(size), *options) for size in (1, tp))
    assert [rank["state"] for rank in together.health["ranks"]] == ["ready"] * tp
    assert together.tokens == alone.tokens
    assert together.losses == pytest.approx(alone.losses, rel=1e-3)
    if compile == "on":
        notes = [*alone.health["notes"], *together.health["notes"]]
        assert not [note for note in notes if "operation by operation" in note or "without CUDA graphs" in note]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_jobs_on_two_gpus_run_their_layers_as_graphs(tmp_path: Path) -> None:
    """In 16 bits, beside generation; a second job goes on with the graphs of the first."""
    options = ("--tp", "2", "--device", "cuda", "--dtype", "bfloat16", "--kv-tokens", "16384")
    with DaemonProcess(Path("bundled"), tmp_path, options=options) as daemon:
        daemon.wait_ready()
        losses = list[list[float]]()
        for name in ("first", "second"):
            _, job = daemon.call("POST", "/finetune", {**job_request(name), "lora": {"r": 16}})
            text = daemon.call("POST", "/generate", {"prompt": PROMPTS[0], **GREEDY})[1]
            events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
            assert len(text["choices"][0]["token_ids"]) == 32
            assert events[-1]["state"] == "succeeded", events[-1]
            losses.append([event["metrics"]["loss"] for event in events if event["type"] == "metrics"])
        assert losses[1] == pytest.approx(losses[0], rel=2e-2)
        health = daemon.call("GET", "/health")[1]
        assert not [note for note in health["notes"] if "training" in note or "NCCL" in note], health["notes"]
        assert daemon.stop() == 0
