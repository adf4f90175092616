"""Policies side by side in virtual time, the documents' own one among them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scheduling.compare import policy_of, row
from coserve.config import Config
from coserve.queues.policies.choice import POLICIES
from coserve.workloads.distributions import Lengths
from coserve.workloads.scenario import Finetuning, Scenario
from coserve.workloads.synthesis import make_trace
from tests.support import fake_ports

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "policies.md"
SCENARIO = Scenario(
    duration=3.0,
    lead=1.0,
    rate=5.0,
    adapters=2,
    prompt_lengths=Lengths.UNIFORM,
    max_tokens=24,
    finetune=Finetuning.ALWAYS,
    finetune_jobs=4,
    finetune_rows=40,
    row_tokens=512,
    batch_tokens=4096,
)


@pytest.mark.slow
def test_policies_and_that_of_the_documents_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_ports, "CONTEXT", fake_ports.CONTEXT)  # so that it is restored
    shown = re.search(r"^```python (\S+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    (tmp_path / shown[1]).write_text(shown[2])
    trace = make_trace(SCENARIO, [], [{"text": "a"}])
    own, config = f"{tmp_path / shown[1]}:InTurns", Config(inference_delay=0.5, ts_unit="batch")
    found = {name: row(trace, policy_of(name), config) for name in (*POLICIES, own)}
    assert found[own] == row(trace, policy_of(own), config)
    assert min(each.training for name, each in found.items() if name != "inference-first") > 0
    assert found["inference-first"].training == min(each.training for each in found.values())
    assert found["inference-first"].tpot < found["slack"].tpot
    assert found["slack"].ttft_p50 < found["ets"].ttft_p50
    assert found["slack"].in_targets == 1 and found["spatial"].training < found["slack"].training
    assert found["ets"].in_targets < 1
    late = make_trace(replace(SCENARIO, slo_e2e=10.0), [], [{"text": "a"}])  # its only limit
    assert row(late, policy_of("ets"), config).in_targets == 1
    assert found["ets"].ttft_p50 > row(trace, policy_of("ets"), Config(inference_delay=0.1)).ttft_p50


def test_a_policy_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match=r"expected one of slack, .* or FILE.py:CLASS, got 'fastest'"):
        policy_of("fastest")
