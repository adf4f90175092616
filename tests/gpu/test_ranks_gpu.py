"""A daemon on two GPUs, with NCCL and CUDA graphs. Run with `pytest -m gpu` on a machine that has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.crash_oracle import job_request
from tests.support.daemon_process import DaemonProcess, Json

pytestmark = pytest.mark.gpu

PROMPTS = ("The quick", "Once upon a time there was", "def main():")
GREEDY: Json = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
@pytest.mark.parametrize("compile", ["on", "off"])
def test_texts_and_losses_on_two_gpus_are_those_of_one(tmp_path: Path, compile: str) -> None:
    found = []
    for tp in (1, 2):
        memory = ("--kv-tokens", "16384")  # other tests use the same GPU
        options = ("--tp", str(tp), "--device", "cuda", "--dtype", "float32", "--compile", compile, *memory)
        with DaemonProcess(Path("bundled"), tmp_path / str(tp), options=options) as daemon:
            daemon.wait_ready()
            texts = [daemon.call("POST", "/generate", {"prompt": prompt, **GREEDY})[1] for prompt in PROMPTS]
            _, job = daemon.call("POST", "/finetune", job_request("learned"))
            events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
            learned = daemon.call("POST", "/generate", {"prompt": PROMPTS[0], "adapter": "learned", **GREEDY})[1]
            assert events[-1]["state"] == "succeeded", events[-1]
            losses = [event["metrics"]["loss"] for event in events if event["type"] == "metrics"]
            tokens = [answer["choices"][0]["token_ids"] for answer in (*texts, learned)]
            health = daemon.call("GET", "/health")[1]
            found.append((tokens, losses, [rank["state"] for rank in health["ranks"]]))
            if compile == "on":
                assert not [note for note in health["notes"] if "operation by operation" in note]
                assert not [note for note in health["notes"] if "layers run without CUDA graphs" in note]
            assert daemon.stop() == 0
    (alone, alone_losses, _), (together, losses, states) = found
    assert states == ["ready", "ready"]
    assert together == alone
    assert losses == pytest.approx(alone_losses, rel=1e-3)


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
