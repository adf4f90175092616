"""Settings with which a workload would never be made, or that no server takes, are refused before anything is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from coserve.cli.app import run as command_line
from coserve.core.errors import InvalidRequest
from coserve.workloads.bounds import SETTINGS
from coserve.workloads.opening import open_workload
from coserve.workloads.presets import PRESETS
from coserve.workloads.scenario import Finetuning, Scenario, make_scenario

REFUSED = [
    ("--process gamma --cv 1e308", "cv: expected at most 100, got 1e+308"),
    ("--process gamma --cv 5e-324", "cv: expected at least 0.01, got 5e-324"),
    ("--output-lengths lognormal --median-tokens 1e308", "median_tokens: expected at most 1,048,576"),
    ("--output-lengths lognormal --length-sigma 1e308", "length_sigma: expected at most 10"),
    ("--rate 1e308", "rate: expected at most 1,000,000"),
    ("--rate 5e-324", "rate: expected at least 1e-09"),
    ("--duration 1e308", "duration: expected at most 1,000,000,000"),
    ("--duration 1e8 --rate 1000", "duration: expected at most 10,000,000 requests in all, got 100,000,000,000"),
    ("--pattern ramp --ramp-rate 1e308", "ramp_rate: expected at most 1,000,000"),
    ("--pattern ramp --ramp-rate 1e6", "duration: expected at most 10,000,000 requests in all, got 60,000,000"),
    ("--pattern on_off --on-seconds 5e-324", "on_seconds: expected at least 0.001"),
    ("--lead 1e308", "lead: expected at most 1,000,000,000"),
    ("--finetune-period 1e-300", "finetune_period: expected at least 0.001"),
    ("--finetune-period 0.001 --lead 1e6", "finetune_period: expected at most 20,000,000 rows in all"),
    ("--finetune-rows 1000000000", "finetune_rows: expected at most 1,000,000, got 1000000000"),
    ("--finetune always --finetune-jobs 1000000000", "finetune_jobs: expected at most 100,000"),
    ("--finetune always --finetune-jobs 100000", "finetune_jobs: expected at most 20,000,000 rows in all"),
    ("--adapters 100000000", "adapters: expected at most 100,000"),
    ("--prompt-lengths uniform --max-prompt-tokens 1000000000", "max_prompt_tokens: expected at most 1,048,576"),
    ("--max-tokens 1000000000", "max_tokens: expected at most 1,048,576"),
    ("--row-tokens 1000000000", "row_tokens: expected at most 262,144"),
    ("--slos nan,-1", "slos: expected a number above 0, got nan"),
    ("--slos 10,-1", "slos: expected a number above 0, got -1.0"),
    ("--slo-ttft inf", "slo_ttft: expected at most 1,000,000,000, got inf"),
    ("--rank 1000000000", "rank: expected at most 1,024"),
    ("--prompt-lengths uniform --vocab 1000000000000000000000", "vocab: expected at most 16,777,216"),
    (f"--prompt-lengths uniform --vocab 1{'0' * 400}", "vocab: expected at most 16,777,216"),
    ("--adapter-prefix ü/../x", "adapter_prefix: expected a name of at most 64 letters"),
    (f"--adapter-prefix {'x' * 62}", "adapter_prefix: expected a name of at most 64 letters"),
    ("--temperature 1e308", "temperature: expected at most 100"),
    ("--popularity power_law --exponent 1e308", "exponent: expected at most 100"),
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_settings_beyond_the_bounds_are_refused_in_one_line(
    tmp_path: Path, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "saved.jsonl"
    assert command_line(["bench", "--no-run", "--save", str(path), *options.split()]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1, said
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "options",
    [
        "--process gamma --cv 100 --rate 1000 --duration 60",
        "--process gamma --cv 0.01 --rate 100 --duration 5",
        "--output-lengths lognormal --median-tokens 1048576 --length-sigma 10 --duration 2",
        "--pattern on_off --on-seconds 0.001 --off-seconds 0.001 --duration 2",
        "--per-adapter --popularity skewed --exponent 100 --adapters 300 --pattern on_off --duration 2",
        "--per-adapter --popularity skewed --exponent 100 --adapters 300 --pattern ramp --ramp-rate 20 --duration 2",
        "--adapters 100000 --duration 2 --adapter-prefix x",
        "--prompt-lengths uniform --max-prompt-tokens 100000 --vocab 16777216 --rate 2 --duration 2",
    ],
)
@pytest.mark.timeout(60)
def test_settings_at_the_bounds_make_a_workload(tmp_path: Path, options: str) -> None:
    path = tmp_path / "saved.jsonl"
    assert command_line(["bench", "--no-run", "--save", str(path), *options.split()]) == 0
    assert len(path.read_bytes().splitlines()) > 1


def test_every_number_of_a_scenario_has_bounds() -> None:
    numbers = {f.name for f in dataclasses.fields(Scenario) if "int" in str(f.type) or "float" in str(f.type)}
    assert numbers - {"seed"} == set(SETTINGS)


def test_presets_may_run_for_a_day() -> None:
    for name in PRESETS:
        assert open_workload({"preset": name, "duration": 86400.0}).scenario == make_scenario(
            {"preset": name, "duration": 86400.0}
        )


def test_rows_are_counted_where_there_are_any() -> None:
    given: dict[str, object] = {"duration": 1e8, "rate": 1e-3}
    with pytest.raises(InvalidRequest, match="expected at most 20,000,000 rows in all"):
        open_workload(given)
    for quiet in ({"adapters": 0}, {"finetune_rows": 0}, {"finetune": Finetuning.OFF}):
        open_workload(given | quiet)


def test_a_recording_at_too_high_a_rate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,8,4,12,API\n")
    assert len(open_workload({"trace": str(path), "duration": 1e8, "finetune_rows": 0}).prompts) == 1
    with pytest.raises(InvalidRequest, match="expected at most 10,000,000 requests in all"):
        open_workload({"trace": str(path), "trace_rate": 1e6, "duration": 1e4})
