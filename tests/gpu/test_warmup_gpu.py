"""What a warm-up has compiled, an engine need not compile. Run with `pytest -m gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coserve.config import Config, config_to_json
from coserve.warmup.launch import compile_ahead
from tests.support.crash_oracle import job_request
from tests.support.daemon_process import DaemonProcess
from tests.support.model_folder import make_model_folder

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent.parent


def test_an_engine_over_filled_caches_compiles_nothing(tmp_path: Path) -> None:
    config = Config(
        model=str(make_model_folder(tmp_path / "model")),
        data_dir=tmp_path / "data",
        device="cuda",
        dtype="bfloat16",
        max_running=4,
        step_tokens=64,
        micro_batch_tokens=64,
        kv_tokens=4096,
    )
    told: list[tuple[int, int]] = []
    compile_ahead(config, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    for measured in ("training-layers", "training-levels"):
        assert [*tmp_path.rglob(f"*-{measured}.json")], "the memory of compiled layers was measured, and their times"
    settings = config_to_json(config).decode()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.warm_start", settings],
            cwd=ROOT, check=False, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found == {"notes": [], "kernels": [], "graphs": 0}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_ranks_over_filled_caches_compile_no_kernel(tmp_path: Path) -> None:
    """Steps with adapters, and a job with block-diagonal matrices, more blocks than GPUs."""
    model, cache = make_model_folder(tmp_path / "model"), str(tmp_path / "cache")
    settings = ("--device", "cuda", "--dtype", "bfloat16", "--max-running", "4", "--step-tokens", "64")
    options = (*settings, "--micro-batch-tokens", "64", "--tp", "2", "--cache-dir", cache)
    warm = [sys.executable, "-m", "coserve.cli", "warm", str(model), *options]
    done = subprocess.run(warm, cwd=ROOT, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    with DaemonProcess(model, tmp_path / "data", options=(*options, "--kv-tokens", "4096")) as daemon:
        daemon.wait_ready()
        _, job = daemon.call("POST", "/finetune", job_request("learned") | {"lora": {"r": 16, "bd_blocks": 4}})
        events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
        assert events[-1]["state"] == "succeeded", events[-1]
        status, _ = daemon.call("POST", "/generate", {"prompt": "The", "adapter": "learned", "max_tokens": 8})
        assert status == 200
        assert daemon.stop() == 0
        assert [line for line in daemon.log.read_text().splitlines() if "was compiled in this process" in line] == []
