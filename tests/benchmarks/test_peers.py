"""The comparison with vLLM and PEFT, without a GPU: PEFT is real, and a small server stands in for vLLM's, with its
command line."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.adapters import with_vllm
from benchmarks.adapters.many import requests_of
from benchmarks.common.results import Results
from benchmarks.peers import trainer
from benchmarks.peers.equal_loads import EqualLoads
from benchmarks.peers.processes import module, running, training, wait_ready
from benchmarks.peers.systems import Place, make_adapters, mps, peer_about, vllm_options
from benchmarks.serving.http_case import RANK, SMALL, model_folder
from coserve.workloads.distributions import Lengths
from coserve.workloads.opening import open_workload
from coserve.workloads.scenario import Finetuning
from coserve.workloads.trace import Trace, load_trace, save_trace
from tests.support.examples import on_days

ROOT = Path(__file__).resolve().parents[2]
FAKE_VLLM = f"""
import asyncio, json, signal, sys, uvloop
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.support.fake_openai import FakeOpenAI, serve_openai

async def main():
    options = sys.argv[1:]
    adapters = options[options.index("--lora-modules") + 1:]
    assert all(Path(each.partition("=")[2], "adapter_config.json").exists() for each in adapters), adapters
    models = [options[options.index("--served-model-name") + 1], *(each.partition("=")[0] for each in adapters)]
    server = FakeOpenAI(tuple(models))
    try:
        async with serve_openai(server, int(options[options.index("--port") + 1])):
            await asyncio.sleep(600)
    finally:
        Path(__file__).with_name("bodies.json").write_text(json.dumps(server.bodies))

signal.signal(signal.SIGTERM, lambda *_: sys.exit())
uvloop.run(main())
"""


def small_trace() -> Trace:
    return open_workload(
        {
            "duration": 2.0,
            "lead": 2.0,
            "rate": 4.0,
            "adapters": 2,
            "rank": (RANK,),
            "temperature": 0.0,
            "vocab": 1000,
            "prompt_lengths": Lengths.UNIFORM,
            "max_prompt_tokens": 20,
            "max_tokens": 6,
            "finetune": Finetuning.ALWAYS,
            "finetune_jobs": 1,
            "finetune_rows": 8,
            "row_tokens": 32,
            "batch_tokens": 64,
            "slo_ttft": 5.0,
            "slo_tpot": 1.0,
        }
    )


def results_in(folder: Path, name: str) -> Results:
    return Results(folder, name, script="here", hardware="here", seed=0, revision="x", settings={})


@pytest.fixture
def place(tmp_path: Path) -> Place:
    folder = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    (folder / "api_server.py").write_text(FAKE_VLLM)
    model = model_folder(tmp_path / "model", SMALL)
    adapters = make_adapters(tmp_path / "adapters", SMALL.config, small_trace().scenario)
    return Place(SMALL, model, adapters, tmp_path, tmp_path / "site")


@on_days(1)
def test_equal_loads_of_vllm_beside_peft(place: Place, tmp_path: Path) -> None:
    """Requests come from processes of their own, PEFT's peak is measured first, and no targets are sent to vLLM. Half
    of the time PEFT trains less."""
    results = results_in(tmp_path, "equal_loads.json")
    asyncio.run(EqualLoads(place, results, (), tiny=True, budget=600).run_peers((0.25, 1.0), ()))
    rows = json.loads((tmp_path / "equal_loads.json").read_text())["rows"]
    assert set(rows) == {"peak.vllm+peft", "r5.vllm+peft", "r5.vllm+peft@d0.25"}
    assert rows["peak.vllm+peft"]["value"] > 0
    assert rows["r5.vllm+peft@d0.25"]["finetune_tok_s"] < rows["r5.vllm+peft"]["finetune_tok_s"]
    assert rows["r5.vllm+peft"]["duty"] == 1.0 and "--gpu-memory-utilization 0.4 " in rows["r5.vllm+peft"]["flags"]
    row, (trace,) = rows["r5.vllm+peft"], (tmp_path / "traces").glob("r5.jsonl")
    prompts = load_trace(trace).prompts
    assert row["requests"] == len(prompts) and row["errors"] == {} and row["finetune_tok_s"] > 0
    bodies = json.loads((tmp_path / "site/vllm/entrypoints/openai/bodies.json").read_text())
    sent = [(body["model"], tuple(body["prompt"]), body["max_tokens"]) for body in bodies[-len(prompts) :]]
    assert sorted(sent) == sorted((str(prompt.adapter), prompt.prompt, prompt.max_tokens) for prompt in prompts)
    assert {body["model"] for body in bodies[: -2 * len(prompts)]} == {"base", "load-00", "load-01"}, "the warm-up"
    assert not any("slo_ttft" in body for body in bodies)


def test_the_loss_in_chunks_is_the_loss(place: Place) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place.model), dtype=torch.float32)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=list(trainer.TARGETS), init_lora_weights=False)
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    ids = torch.randint(0, 8192, (2, 16))
    expected = model(input_ids=ids, labels=ids).loss
    found = trainer.chunked_loss(model, ids, chunk=7)
    # Means over the targets of both rows: transformers takes the same.
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(torch.autograd.grad(found, trained), torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_batches_are_the_rows_of_the_traces_jobs(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    save_trace(small_trace(), path)
    made = trainer.batches(path, place.model, 2, 32)
    first = [next(made) for _ in range(20)]
    assert all(len(batch) == 2 and {len(row) for row in batch} == {32} for batch in first)
    assert len({tuple(row) for batch in first for row in batch}) > 4
    quiet = Trace(small_trace().scenario, [])
    save_trace(quiet, path)
    with pytest.raises(SystemExit, match="expected fine-tuning jobs"):
        next(trainer.batches(path, place.model, 2, 32))


def test_vllms_options(place: Place) -> None:
    options = vllm_options(place, small_trace().scenario, 1234, 0.4)
    given = dict(itertools.pairwise(options))
    assert (given["--max-lora-rank"], given["--max-loras"], given["--gpu-memory-utilization"]) == ("16", "2", "0.4")
    assert "--no-enable-prefix-caching" in options and options[-1].startswith("load-01=")


@on_days(2)
def test_many_adapters_with_vllm(place: Place, tmp_path: Path) -> None:
    """vLLM gets all adapters at its start, with each number of places; coserve is compared with the best of them."""
    arguments = ["--tiny", "--vllm-site", str(place.site), "--vllm-strong", "--vllm-option", "lora-target-modules=a,b"]
    (root := tmp_path / "root").mkdir()
    results = results_in(tmp_path, "adapters_many.json")
    options = with_vllm.parse([*arguments, "--max-loras", "4,256", "--out", str(tmp_path)])
    compared = with_vllm.comparison(root, options, results)
    results.put("adapters.coserve.requests_s.20.alpha1", 5.0, "requests/s")
    case = replace(compared.case, seconds=5.0)
    asyncio.run(replace(compared, case=case).vllm())
    rows = json.loads((tmp_path / "adapters_many.json").read_text())["rows"]
    del rows["adapters.coserve.requests_s.20.alpha1"]
    own = {f"adapters.vllm.requests_s.20.{name}.l{n}.strong" for name in ("alpha1", "uniform") for n in (4, 20)}
    assert set(rows) == {*own, "adapters.vs_vllm.20.alpha1"}
    best = max((rows[key] for key in own if "alpha1" in key), key=lambda row: row["value"])
    assert rows["adapters.vs_vllm.20.alpha1"]["value"] == pytest.approx(5 / best["value"], abs=0.01)
    told = rows["adapters.vllm.requests_s.20.alpha1.l4.strong"]
    assert "--max-loras 4 --max-cpu-loras 20 --max-lora-rank 8 " in told["flags"] and told["errors"] == {}
    assert "--lora-target-modules a b" in told["flags"] and "--specialize-active-lora" in told["flags"]
    bodies = json.loads((tmp_path / "site/vllm/entrypoints/openai/bodies.json").read_text())
    sent = requests_of(case, compared.scenario.adapter_names, 0, case.rate)
    last = sorted((body["model"], body["prompt"], body["max_tokens"]) for body in bodies[-len(sent) :])
    assert last == sorted((each.adapter, each.prompt, each.max_tokens) for each in sent)


def test_strong_settings_are_told_with_the_versions(place: Place) -> None:
    (place.site / "vllm-0.26.0.dist-info").mkdir()  # type: ignore[operator]
    (place.site / "vllm-0.26.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.26.0\n")  # type: ignore[operator]
    told = peer_about(replace(place, strong=True), small_trace().scenario, memory=0.4)
    assert told["versions"] == {"vllm": "0.26.0"}
    assert "--specialize-active-lora" in str(told["flags"]) and str(place.scratch) not in str(told["flags"])
    assert "VLLM_LORA_ENABLE_DUAL_STREAM" in str(told["environment"])


async def test_mps_is_started_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text('#!/bin/sh\necho "$@ $(cat)" >> "$CUDA_MPS_LOG_DIRECTORY/calls"\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    async with mps(tmp_path / "mps") as environment:
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "mps")
    assert (tmp_path / "mps" / "calls").read_text().split() == ["-d", "quit", "-t", "10"]


def test_another_duty_ends_a_pause() -> None:
    duty = trainer.Duty()
    duty.set(0.001)
    paused = threading.Thread(target=duty.pause, args=(3600.0,))
    paused.start()
    while paused.is_alive():  # `pause` may have begun only after the first one
        duty.set(1.0)
        paused.join(0.01)


async def test_mps_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="MPS does not start"):
        async with mps(tmp_path / "mps"):
            pass


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
async def test_a_process_that_fails_shows_its_log_and_leaves_no_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); signal.pause()"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); sys.exit(3)"
    log = tmp_path / "log"
    with pytest.raises(SystemExit, match="did not start"):
        async with running([sys.executable, "-c", parent], log, {}) as process:
            group = process.pid
            while b"child" not in await asyncio.to_thread(log.read_bytes):  # noqa: ASYNC110 - files send no event
                await asyncio.sleep(0.02)
            await wait_ready("http://127.0.0.1:1", process, log)
    assert "child" in capsys.readouterr().out
    while group_exists(group):  # noqa: ASYNC110 - groups send no event
        await asyncio.sleep(0.02)


@on_days(5)
async def test_a_trainer_that_fails_ends(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    save_trace(small_trace(), path)
    command = module("benchmarks.peers.trainer", "--trace", str(path), "--model", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit, match="the trainer ended"):
        async with training(command, tmp_path / "log", {}):
            pass
