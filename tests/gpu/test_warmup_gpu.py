"""What a warm-up has compiled, an engine need not compile. Run with `pytest -m gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coserve.config import Config, config_to_json
from coserve.engine.warmup.launch import compile_ahead
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
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found == {"notes": [], "kernels": [], "serving": [], "graphs": 0}


def used_gpu_bytes() -> int:
    """Of the first GPU, by all processes."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def test_a_cold_daemon_serves_once_all_is_compiled_and_its_workers_are_gone(tmp_path: Path) -> None:
    """Then nothing is compiled, requests wait for nothing, and a job runs at once; the next start finds everything."""
    model = make_model_folder(tmp_path / "model")
    options = (
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
        "--max-running",
        "4",
        "--step-tokens",
        "64",
        "--micro-batch-tokens",
        "64",
        "--cache-dir",
        str(tmp_path / "cache"),
        "--memory-fraction",
        "0.2",
    )
    said = list[list[str]]()
    for start in ("cold", "warm"):
        with DaemonProcess(model, tmp_path / "data", options=options) as daemon:
            daemon.wait_ready()
            _, health = daemon.call("GET", "/health")
            assert (health["status"], health["warming"]) == ("ready", None)
            assert not [note for note in health["notes"] if "warm-up" in note], health["notes"]
            memory = health["memory"]
            assert (
                memory is not None and used_gpu_bytes() < 1.2 * 0.2 * torch.cuda.get_device_properties(0).total_memory
            )
            _, job = daemon.call("POST", "/finetune", job_request(f"learned-{start}"))
            status, _ = daemon.call("POST", "/generate", {"prompt": "The", "max_tokens": 8})
            assert status == 200
            events = list(daemon.events("GET", f"/finetune/{job['id']}/events"))
            assert events[-1]["state"] == "succeeded", events[-1]
            assert daemon.stop() == 0
            lines = daemon.log.read_text().splitlines()
            said.append([line for line in lines if "was compiled in this process" in line])
    assert said == [[], []]


def test_a_daemon_whose_workers_cannot_run_starts_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, broken = make_model_folder(tmp_path / "model"), tmp_path / "broken" / "sitecustomize.py"
    broken.parent.mkdir()
    broken.write_text(
        "import sys\nif 'coserve.engine.warming.process' in ' '.join(sys.orig_argv): raise SystemExit(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{broken.parent}:{ROOT}")
    options = (
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
        "--max-running",
        "4",
        "--step-tokens",
        "64",
        "--kv-tokens",
        "4096",
    )
    with DaemonProcess(model, tmp_path / "data", options=options) as daemon:
        daemon.wait_ready()
        _, health = daemon.call("GET", "/health")
        assert any(note.startswith("warm-up: layers, ") and "its process died" in note for note in health["notes"]), (
            health["notes"]
        )
        assert daemon.call("POST", "/generate", {"prompt": "The", "max_tokens": 8})[0] == 200
        assert daemon.stop() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_ranks_over_filled_caches_compile_no_kernel(tmp_path: Path) -> None:
    """Steps with adapters, and a job with block-diagonal matrices, more blocks than GPUs."""
    model, cache = make_model_folder(tmp_path / "model"), str(tmp_path / "cache")
    settings = ("--device", "cuda", "--dtype", "bfloat16", "--max-running", "4", "--step-tokens", "64")
    options = (*settings, "--micro-batch-tokens", "64", "--tp", "2", "--cache-dir", cache)
    warm = [sys.executable, "-m", "coserve", "warm", str(model), *options]
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
