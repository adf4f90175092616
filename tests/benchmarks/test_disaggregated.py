"""The benchmark of LoRA servers: what it compares, and what is left of a run that fails."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.adapters.fleet import ablation
from benchmarks.common.results import Results
from benchmarks.moe import disaggregated
from benchmarks.moe.disaggregated import FULL, TINY, Inputs, Run, at_once, compare, latencies, planned_ep
from coserve.workloads.replay import Sample


def sample(due: float, times: tuple[float, ...], adapter: str = "a") -> Sample:
    end = times[-1] if times else due + 9
    return Sample(index=0, adapter=adapter, due=due, sent=due, times=times, tokens=len(times), finished=end, error=None)


def make(tmp_path: Path, system: str, gpus: int = 2) -> Run:
    results = Results(tmp_path, "found.json", script="x.y", hardware="none", seed=0, revision="abc", settings={})
    return Run(FULL, system, 0.3, gpus, results, time.monotonic() + 60)


def rows(tmp_path: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((tmp_path / "found.json").read_text())["rows"]
    return found


def test_latencies_count_a_request_without_an_answer() -> None:
    answered = [sample(float(i), (i + 0.1, i + 0.2, i + 0.4)) for i in range(39)]
    ttft, tpot = latencies(answered)
    assert ttft == pytest.approx(0.1) and tpot == pytest.approx(0.15)
    assert math.isinf(latencies([*answered, sample(40.0, ()), sample(41.0, ()), sample(42.0, ())])[0])
    overlapping = [sample(0.0, (1.0, 5.0)), sample(0.0, (2.0, 3.0), "b"), sample(0.0, (2.5, 6.0)), sample(9.0, ())]
    assert at_once(overlapping) == {"requests": 3, "adapters": 2}


def test_both_systems_have_as_much_memory_for_adapters(tmp_path: Path) -> None:
    """Coupled, in the pages of all ranks together; apart, on the servers, which hold what host memory holds."""
    inputs = Inputs(tmp_path, tmp_path)
    coupled, servers = (make(tmp_path, system).settings(inputs, tmp_path) for system in ("coupled", "servers"))
    assert coupled["host_adapter_bytes"] == servers["host_adapter_bytes"] == math.ceil(153.6 * FULL.adapter_bytes)
    token = 2 * 48 * 4 * 128 * 2
    more = (int(str(coupled["kv_tokens"])) - int(str(servers["kv_tokens"]))) * token
    assert more == pytest.approx(153.6 * FULL.adapter_bytes, abs=token)
    assert coupled["tp"] == coupled["ep"] == 2 and servers["lora_server"] == 1 and "tp" not in servers
    assert make(tmp_path, "servers", gpus=4).settings(inputs, tmp_path)["lora_server"] == 3
    assert FULL.adapter_bytes > FULL.shape.adapter_bytes(4) and 3 % planned_ep(FULL, 0.3, 3) == 0


def test_a_daemon_that_fails_leaves_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def failing(settings: object, log: Path, **environment: str) -> Iterator[str]:
        log.write_text("CUDA out of memory")
        raise SystemExit("the daemon did not start")
        yield

    monkeypatch.setattr(disaggregated, "daemon", failing)
    run = make(tmp_path, "servers")
    run.measured, run.kept = [2.0], [2.0]  # of rates before it died
    run.measure(Inputs(tmp_path, tmp_path))
    found = rows(tmp_path)
    failed = found["infini.failed.servers.r0.3"]
    assert "did not start" in str(failed["error"]) and failed["log"] == "CUDA out of memory"
    assert found["infini.rate.servers.r0.3"]["value"] == 2.0


def test_a_gain_is_that_of_what_both_kept(tmp_path: Path) -> None:
    coupled, servers = make(tmp_path, "coupled"), make(tmp_path, "servers")
    coupled.kept = [2.0]
    compare(coupled, servers, coupled.results)
    assert not (tmp_path / "found.json").exists(), "servers were not measured"
    coupled.kept, coupled.tpot = [2.0, 4.0], {2.0: 0.02, 4.0: 0.03, 8.0: 0.2}
    servers.measured, servers.kept, servers.tpot = [2.0, 4.0, 8.0], [2.0], {2.0: 0.03, 4.0: 0.09, 8.0: 0.3}
    compare(coupled, servers, coupled.results)
    found = rows(tmp_path)
    assert found["infini.rate_gain.r0.3"]["value"] == 0.5
    assert found["infini.tpot_ratio.r0.3"]["value"] == 1.5 and found["infini.tpot_ratio.r0.3"]["within_limits"]
    servers.kept = []
    compare(coupled, servers, coupled.results)
    assert (
        rows(tmp_path)["infini.tpot_ratio.r0.3"] | {"rate": 8.0, "within_limits": False}
        == rows(tmp_path)["infini.tpot_ratio.r0.3"]
    )


@pytest.mark.slow
def test_what_is_turned_off_is_replaced(tmp_path: Path) -> None:
    run = replace(make(tmp_path, "servers"), case=TINY, without="overlap")
    assert run.name.endswith(".no_overlap")
    code = "import coserve.engine.lora_server.running as own; print(own.RemoteStep.gate_up.__module__)"
    command = [sys.executable, "-c", code, "coserve.engine.process"]
    own = os.environ | ablation(disaggregated.__file__, run.without)
    ended = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "sitecustomize"
