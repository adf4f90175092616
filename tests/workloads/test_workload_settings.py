"""One declaration of the workload's settings: presets, TOML, command line, and what they make. Settings with which a
workload would never be made, that no server takes or that have no effect beside the others are found before."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coserve.cli import app
from coserve.cli.app import run as command_line
from coserve.core.errors import ConfigError, InvalidRequest
from coserve.core.options import parse_setting
from coserve.core.training.settings import TrainingSettings
from coserve.workloads.arrivals import Pattern, Process
from coserve.workloads.bounds import SETTINGS
from coserve.workloads.bundled import bundled_rows
from coserve.workloads.distributions import Lengths, Shape
from coserve.workloads.opening import all_rules, open_workload, unused_settings
from coserve.workloads.scenario import (
    PRESETS,
    Finetuning,
    Scenario,
    TraceFormat,
    given_settings,
    make_scenario,
    sections,
)
from coserve.workloads.trace import load_trace

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


ALWAYS = {"preset", "seed", "duration", "lead", "temperature", "batch_share", "slo_ttft", "slos", "trace", "prompts"}
"""Settings that always have an effect."""


def unused(trace: TraceFormat | None = None, **texts: str) -> dict[str, str]:
    given: dict[str, Any] = {name: parse_setting(Scenario, name, text) for name, text in texts.items()}
    return unused_settings(given, make_scenario(given), trace)


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        ({"cv": "4"}, "--process gamma"),
        ({"cv": "4", "process": "poisson"}, "--process gamma"),
        ({"exponent": "2"}, "--popularity power_law or skewed"),
        ({"exponent": "2", "popularity": "distinct"}, "--popularity power_law or skewed"),
        ({"on_seconds": "2"}, "--pattern on_off"),
        ({"off_seconds": "2", "pattern": "ramp"}, "--pattern on_off"),
        ({"off_rate": "2"}, "--pattern on_off"),
        ({"ramp_rate": "2"}, "--pattern ramp"),
        ({"per_adapter": "true", "adapters": "0"}, "--adapters above 0"),
        ({"rank": "4", "adapters": "0"}, "--adapters above 0"),
        ({"min_prompt_tokens": "2"}, "--prompt-lengths uniform or lognormal"),
        ({"vocab": "9999"}, "--prompt-lengths uniform or lognormal"),
        ({"median_prompt_tokens": "9", "prompt_lengths": "uniform"}, "--prompt-lengths lognormal"),
        ({"median_tokens": "9"}, "--output-lengths lognormal"),
        ({"length_sigma": "9"}, "--output-lengths lognormal"),
        ({"trace_format": "mooncake"}, "--trace"),
        ({"trace_rate": "2"}, "a BurstGPT or Mooncake file"),
        ({"trace_model": "x"}, "a BurstGPT file"),
        ({"tokenizer": "x"}, "a ShareGPT file"),
        ({"max_total_tokens": "9", "prompt_lengths": "uniform"}, "a ShareGPT file"),
        ({"min_tokens": "3", "prompts": "x.json"}, "lengths of the file"),
        ({"prompt_lengths": "uniform", "prompts": "x.json"}, "lengths of the file"),
        ({"batch_tokens": "9", "finetune": "off"}, "--finetune bursts or always"),
        ({"finetune_rows": "9", "finetune": "off"}, "--finetune bursts or always"),
        ({"finetune_jobs": "9"}, "--finetune always"),
        ({"finetune_period": "9", "finetune": "always"}, "--finetune bursts"),
        ({"epochs": "9", "finetune_rows": "0"}, "--finetune-rows above 0"),
        ({"finetune": "always", "adapters": "0"}, "--adapters above 0"),
        ({"epochs": "9", "preset": "equal-8b"}, "--steps 25"),
        ({"slo_batch_tpot": "1"}, "--batch-share above 0"),
        ({"slo_e2e": "1", "batch_share": "1"}, "--batch-share below 1"),
    ],
)
def test_a_setting_without_effect_is_found(given: dict[str, str], needs: str) -> None:
    (found,) = unused(**given).items()
    assert found[0] in given and needs in found[1]


@pytest.mark.parametrize(
    ("trace", "name"),
    [
        (TraceFormat.BURSTGPT, "rate"),
        (TraceFormat.MOONCAKE, "process"),
        (TraceFormat.MOONCAKE, "trace_model"),
        (TraceFormat.SHAREGPT, "trace_start"),
        (TraceFormat.SHAREGPT, "max_tokens"),
        (TraceFormat.BURSTGPT, "max_prompt_tokens"),
    ],
)
def test_a_recording_takes_the_place_of_settings(trace: TraceFormat, name: str) -> None:
    text = {"process": "gamma", "trace_model": "x"}.get(name, "2")
    assert list(unused(trace, **{name: text})) == [name]


@pytest.mark.parametrize(
    ("trace", "given"),
    [
        (None, {"process": "gamma", "cv": "2", "popularity": "skewed", "exponent": "2", "per_adapter": "true"}),
        (None, {"pattern": "on_off", "on_seconds": "1", "off_seconds": "1", "off_rate": "1", "row_tokens": "64"}),
        (None, {"pattern": "ramp", "ramp_rate": "1", "adapters": "0", "finetune": "off", "per_adapter": "false"}),
        (None, {"prompt_lengths": "lognormal", "length_sigma": "1", "vocab": "999", "median_prompt_tokens": "9"}),
        (None, {"adapters": "0", "finetune_rows": "0"}),
        (None, {"finetune": "off", "finetune_rows": "0"}),
        (None, {"batch_share": "0.5", "slo_tpot": "1", "slo_batch_ttft": "1", "slo_batch_tpot": "1", "steps": "3"}),
        (TraceFormat.BURSTGPT, {"vocab": "999", "trace_model": "x", "trace_rate": "2", "trace_format": "burstgpt"}),
        (TraceFormat.SHAREGPT, {"tokenizer": "x", "max_total_tokens": "9", "process": "gamma", "cv": "2"}),
    ],
)
def test_a_setting_with_an_effect_is_not(trace: TraceFormat | None, given: dict[str, str]) -> None:
    assert unused(trace, **given) == {}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_no_setting_without_effect(name: str) -> None:
    settings = set(PRESETS[name].settings) - {"max_total_tokens"}  # of the ShareGPT file that flexllm-8b asks for
    assert unused_settings(settings, make_scenario({"preset": name}), None) == {}


def test_every_setting_is_known() -> None:
    """A new setting is in a rule, or in `ALWAYS`."""
    formats = (None, *TraceFormat)
    ruled = {name for trace in formats for rule in all_rules(Scenario(), trace) for name in rule.names}
    assert {f.name for f in dataclasses.fields(Scenario)} == ruled | ALWAYS | {"adapters"}
    assert not ruled & ALWAYS


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
        ("rate = true", "rate: expected a number, got a boolean"),
        ('rate = "fast"', "rate: expected a number, got 'fast'"),
        ('rank = ["8", "4"]', "rank: expected a list of numbers, got an array"),
        ('rank = "8,x"', "rank: expected an integer, got 'x'"),
        ("per_adapter = 1", "per_adapter: expected a boolean"),
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
        *("--inference-batch-size", "--max-running", "--rates", "--cells", "--seconds", "--vllm-site", "--out"),
        *("--systems", "--plain"),
    }
    assert not {option for option in options - others if option not in shown}
