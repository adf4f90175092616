"""One declaration of the workload's settings: presets, TOML, command line, and what they make."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coserve.cli import app
from coserve.core.errors import ConfigError, InvalidRequest
from coserve.core.training.settings import TrainingSettings
from coserve.workloads.arrivals import Pattern, Process
from coserve.workloads.bundled import bundled_rows
from coserve.workloads.lengths import Lengths
from coserve.workloads.opening import open_workload
from coserve.workloads.popularity import Shape
from coserve.workloads.presets import PRESETS
from coserve.workloads.scenario import Finetuning, Scenario, given_settings, make_scenario, sections
from coserve.workloads.trace import load_trace


def test_order_of_command_line_file_preset_and_default(tmp_path: Path) -> None:
    file = tmp_path / "load.toml"
    file.write_text('preset = "slora-7b-a100"\nrank = [4, 2]\nseed = 3\nslo-ttft = 1\nper_adapter = false\n')
    found = make_scenario(given_settings({"seed": 5, "rate": 1.5}, file))
    assert (found.seed, found.rate, found.rank, found.slo_ttft) == (5, 1.5, (4, 2), 1.0)
    assert (found.per_adapter, found.adapters, found.process, found.lead) == (False, 200, Process.GAMMA, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed = 3", "workload: unknown setting 'speed'"),
        ('process = "tidal"', "process: expected one of constant, poisson, gamma, got 'tidal'"),
        ("rate = true", "rate: expected float, got bool"),
        ('rate = "fast"', "rate: expected float, got 'fast'"),
        ('rank = ["8", "4"]', "rank: expected a list of numbers, got list"),
        ('rank = "8,x"', "rank: expected int, got 'x'"),
        ("per_adapter = 1", "per_adapter: expected bool"),
        ("rate = ", "workload: cannot read"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "load.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        given_settings({}, file)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"expected one of ets-5.1, .* got 'ets'"):
        make_scenario({"preset": "ets"})
    with pytest.raises(InvalidRequest, match="cv"):
        make_scenario({"process": Process.GAMMA, "cv": 0.0})


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_workload(name: str) -> None:
    trace = open_workload(
        {"preset": name, "duration": 2.0, "adapters": min(4, make_scenario({"preset": name}).adapters)}
    )
    assert len(trace.prompts) > 0 and trace.scenario.preset == name
    assert bool(trace.finetunes) == (trace.scenario.finetune is not Finetuning.OFF)


def test_the_papers_tables() -> None:
    ets, slora = make_scenario({"preset": "ets-5.1"}), make_scenario({"preset": "slora-13b-a100"})
    assert dataclasses.replace(ets, preset=None, slo_e2e=None) == Scenario()
    assert (slora.adapters, slora.exponent, slora.rate, slora.cv, slora.duration) == (400, 1.0, 6.0, 1.0, 300.0)
    assert (slora.min_prompt_tokens, slora.max_prompt_tokens, slora.min_tokens, slora.max_tokens) == (8, 512, 8, 512)
    assert (slora.popularity, slora.per_adapter, slora.rank) == (Shape.POWER_LAW, True, (64, 32, 16))
    equal = make_scenario({"preset": "equal-8b"})
    assert (equal.slo_ttft, equal.slo_tpot, equal.batch_tokens, equal.row_tokens) == (5.0, 0.045, 4096, 512)
    assert equal.training == TrainingSettings(steps=25, batch_tokens=4096, max_length=512)


def test_ranks_go_round_the_adapters() -> None:
    scenario = make_scenario({"preset": "slora-7b-a100-s2"})
    assert [scenario.rank_of(i) for i in range(6)] == [64, 32, 16, 8, 64, 32]


def test_each_adapter_has_the_rate_of_its_popularity() -> None:
    given = {"preset": "slora-7b-a100", "adapters": 8, "duration": 400.0, "max_prompt_tokens": 9, "cv": 2.0}
    trace = open_workload(given)
    counts = Counter(prompt.adapter for prompt in trace.prompts)
    total = sum(1 / (i + 1) for i in range(8))
    for i, name in enumerate(trace.scenario.adapter_names):
        expected = 4000 / (i + 1) / total
        assert counts[name] == pytest.approx(expected, abs=4 * 2.0 * expected**0.5)


def test_lengths_are_drawn_as_asked() -> None:
    lognormal: dict[str, Any] = {"prompt_lengths": Lengths.LOGNORMAL, "output_lengths": Lengths.LOGNORMAL}
    prompts = open_workload(
        lognormal | {"rate": 300.0, "duration": 10.0, "max_tokens": 600, "max_prompt_tokens": 500, "finetune_rows": 0}
    ).prompts
    inputs, outputs = sorted(len(p.prompt) for p in prompts), sorted(p.max_tokens for p in prompts)
    assert inputs[1500] == pytest.approx(160, rel=0.08) and outputs[1500] == pytest.approx(180, rel=0.08)
    assert inputs[-1] == 500 and outputs[-1] == 600 and outputs[0] >= 16
    assert inputs.count(500) / 3000 == pytest.approx(0.052, abs=0.02), "clipped, not drawn again"


def test_training_that_is_always_on() -> None:
    trace = open_workload(
        {"finetune": Finetuning.ALWAYS, "finetune_jobs": 5, "finetune_rows": 7, "adapters": 3, "row_tokens": 64}
    )
    assert [(job.at, job.adapter, len(job.rows)) for job in trace.finetunes] == [
        (0.0, f"load-0{i % 3}", 7) for i in range(5)
    ]
    assert {len(row["text"]) for row in trace.finetunes[0].rows} == {512}
    assert len(bundled_rows(4000)[0]["text"]) == 32000


def test_every_setting_is_an_option_with_help() -> None:
    result = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"})
    names = [f.name for f in dataclasses.fields(Scenario)]
    assert [name for section in sections().values() for name in section] == names
    for name in (*names, "workload", "save", "fail-under", "server", "prefix", "report"):
        assert f"--{name.replace('_', '-')}" in result.output
    assert "constant|poisson|gamma" in result.output and "steady|on_off|ramp" in result.output


def test_options_of_the_command_line_make_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    options = "--process gamma --cv 3 --per-adapter --pattern on_off --on-seconds 2 --off-seconds 3 --rank 8,4 --popularity power_law"  # noqa: E501
    options += f" --exponent 0.8 --targets q_proj,v_proj --duration 5 --finetune off --save {path} --no-run"
    result = CliRunner().invoke(app, ["bench", *options.split()])
    assert result.exit_code == 0, result.output
    scenario = open_workload({"trace": str(path)}).scenario
    assert (scenario.process, scenario.cv, scenario.pattern, scenario.rank) == (
        Process.GAMMA,
        3.0,
        Pattern.ON_OFF,
        (8, 4),
    )
    assert (scenario.per_adapter, scenario.targets, scenario.exponent) == (True, ("q_proj", "v_proj"), 0.8)


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "bench.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_shows_what_there_is(tmp_path: Path) -> None:
    assert all(f"`{name}`" in PAGE for name in [*PRESETS, "slo_worst", "finetune_share"])
    (toml,) = blocks("toml")
    (tmp_path / "my.toml").write_text(toml)
    found = make_scenario(given_settings({}, tmp_path / "my.toml"))
    assert (found.rank, found.pattern, found.adapters) == ((64, 32, 16, 8), Pattern.ON_OFF, 200)
    (trace,) = blocks("text")
    (tmp_path / "t.jsonl").write_text(trace.replace(", ...}}", "}}"))
    assert len(list(load_trace(tmp_path / "t.jsonl").arrivals)) == 3
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    shown = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "200"}).output
    others = {
        "--inference-batch-size",
        "--max-running",
        "--rates",
        "--cells",
        "--seconds",
        "--vllm-site",
        "--out",
        "--systems",
        "--plain",
    }
    assert not {option for option in options - others if option not in shown}
