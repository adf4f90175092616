"""What a daemon on the bundled base answers while it trains, to compare numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.support.crash_oracle import job_request
from tests.support.daemon_process import DaemonProcess, Json

PROMPTS = ("The quick", "Once upon a time there was", "def main():")
GREEDY: Json = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}


class Answers(NamedTuple):
    tokens: list[list[int]]
    """Of the base while the job trains, then of the job's adapter."""
    losses: list[float]
    health: Json


def answers(folder: Path, *options: str, lora: Json | None = None) -> Answers:
    """Start a daemon with these options in `folder`, train a job (`lora`: its settings), generate meanwhile and
    afterwards, stop it."""
    with DaemonProcess(Path("bundled"), folder, options=("--dtype", "float32", *options)) as daemon:
        daemon.wait_ready()
        _, job = daemon.call("POST", "/finetune", job_request("learned") | ({"lora": lora} if lora else {}))
        texts = [daemon.call("POST", "/generate", {"prompt": prompt, **GREEDY})[1] for prompt in PROMPTS]
        events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
        assert events[-1]["state"] == "succeeded", events[-1]
        texts.append(daemon.call("POST", "/generate", {"prompt": PROMPTS[0], "adapter": "learned", **GREEDY})[1])
        losses = [event["metrics"]["loss"] for event in events if event["type"] == "metrics"]
        health = daemon.call("GET", "/health")[1]
        assert daemon.stop() == 0
    return Answers([text["choices"][0]["token_ids"] for text in texts], losses, health)
