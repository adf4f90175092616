"""Opens the workload that the settings name: a coserve trace, a recording in another format, or a synthetic one. Says
which of the settings have no effect on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coserve.core.errors import InvalidRequest
from coserve.workloads.arrivals import Pattern, Process
from coserve.workloads.bundled import bundled_prompts, bundled_rows
from coserve.workloads.distributions import Lengths, Shape
from coserve.workloads.recordings import first_request, open_source, trace_format
from coserve.workloads.scenario import Finetuning, Scenario, TraceFormat, make_scenario
from coserve.workloads.synthesis import make_trace
from coserve.workloads.trace import PromptArrival, Trace, load_trace

BESIDE_A_TRACE = {
    "trace",
    "trace_format",
    "slo_ttft",
    "slo_tpot",
    "slo_e2e",
    "slo_batch_ttft",
    "slo_batch_tpot",
    "slos",
}
"""Settings that do not change what is sent. They may be combined with a coserve trace, which has its own settings."""
FILTERS = ("trace_model", "trace_start", "trace_speed", "trace_rate", "duration")
"""Settings that select requests of a recording."""


def open_workload(given: Mapping[str, object]) -> Trace:
    """Return the workload for the settings that were given (`scenario.given_settings`). Files are read at iteration.

    Raises `InvalidRequest` for settings that contradict each other, `MalformedRow` for a file of unknown format.
    """
    scenario = make_scenario(given)
    if scenario.trace is not None and trace_format(scenario) is TraceFormat.COSERVE:
        return _with_limits(load_trace(Path(scenario.trace)), given)
    trace = make_trace(scenario, bundled_prompts(), bundled_rows(scenario.row_tokens), open_source(scenario))
    return Trace(_without_folders(scenario), trace.arrivals)


def unused(given: Mapping[str, object]) -> dict[str, str]:
    """Return the given settings without effect, each with what it needs (`unused_settings`). Settings that
    conflict with a coserve trace are refused by `open_workload` instead. Raises as `open_workload`."""
    scenario = make_scenario(given)
    found = trace_format(scenario)
    return {} if found is TraceFormat.COSERVE else unused_settings(given, scenario, found)


def check_requests(trace: Trace, given: Mapping[str, object]) -> None:
    """Raise `InvalidRequest` if the workload of `given` has no request; also raises what reading it raises."""
    if any(isinstance(arrival, PromptArrival) for arrival in trace.arrivals):
        return
    scenario = make_scenario(given)
    if "trace" not in given:
        asked = f"in {scenario.duration:g} s at {scenario.rate:g} a second"
        raise InvalidRequest(f"expected at least one request, got none {asked}", field="rate")
    expected = "expected at least one request in the trace, got none"
    if trace_format(scenario) is TraceFormat.COSERVE:
        raise InvalidRequest(expected, field="trace")
    names = [name for name in FILTERS if name in given or name == "duration"]
    options = [f"--{name.replace('_', '-')} {_value_text(getattr(scenario, name))}" for name in names]
    raise InvalidRequest(f"{expected} with {', '.join(options)}{_elsewhere(scenario)}", field="trace")


def check_save(path: Path, given: Mapping[str, object]) -> None:
    """Raise `InvalidRequest` if saving to `path` would replace a recording that the workload of `given` reads."""
    scenario = make_scenario(given)
    recordings = {"prompts": scenario.prompts}
    if trace_format(scenario) is not TraceFormat.COSERVE:
        recordings["trace"] = scenario.trace
    for name, recording in recordings.items():
        if recording is not None and path.exists() and Path(recording).exists() and path.samefile(recording):
            raise InvalidRequest(f"expected another file than the recording of --{name}", field="save")


def _value_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _elsewhere(scenario: Scenario) -> str:
    """Return a text that tells where the recording's first request is, if it is outside the selected window."""
    first = first_request(scenario)
    begin = scenario.trace_start
    if first is None or begin <= first < begin + scenario.duration * scenario.trace_speed:
        return ""
    return f"; the first one is at {first} s: --trace-start {first} skips to it"


def _with_limits(trace: Trace, given: Mapping[str, object]) -> Trace:
    if others := sorted(set(given) - BESIDE_A_TRACE):
        raise InvalidRequest(f"the trace has settings of its own: expected no {', '.join(others)}", field="trace")
    limits: dict[str, Any] = {name: value for name, value in given.items() if name.startswith("slo")}
    return Trace(dataclasses.replace(trace.scenario, **limits), trace.arrivals)


def _without_folders(scenario: Scenario) -> Scenario:
    """Return the scenario to save, without the folders of its files, which are private."""
    return dataclasses.replace(
        scenario,
        trace=scenario.trace and Path(scenario.trace).name,
        prompts=scenario.prompts and Path(scenario.prompts).name,
        tokenizer=Path(scenario.tokenizer).name,
    )


TIMES = ("process", "rate", "cv", "per_adapter", "pattern", "on_seconds", "off_seconds", "off_rate", "ramp_rate")
PROMPTS = ("prompt_lengths", "min_prompt_tokens", "max_prompt_tokens", "median_prompt_tokens")
OUTPUTS = ("output_lengths", "min_tokens", "max_tokens", "median_tokens", "length_sigma")
ADAPTERS = ("rank", "targets", "popularity", "exponent", "adapter_prefix", "per_adapter")
TRAINING = ("row_tokens", "steps", "epochs", "batch_tokens", "learning_rate", "checkpoint_steps")
JOBS = ("finetune_period", "finetune_jobs", *TRAINING)
"""Settings that depend on the same other settings: see `Rule`."""


class Rule(NamedTuple):
    """The settings `names` have an effect only if `met`; `needs` says what they need."""

    names: tuple[str, ...]
    met: bool
    needs: str


def all_rules(scenario: Scenario, trace: TraceFormat | None) -> list[Rule]:
    """Return a rule for every setting that depends on others."""
    rules = [*_arrival_rules(scenario, trace), *_content_rules(scenario, trace)]
    return [*rules, *_job_rules(scenario), *_class_rules(scenario)]


def unused_settings(given: Iterable[str], scenario: Scenario, trace: TraceFormat | None) -> dict[str, str]:
    """Return the settings in `given` without effect, each with what it needs. `trace`: format of the scenario's trace
    file."""
    rules = all_rules(scenario, trace)
    found: dict[str, str] = {}
    for name in given:
        needs = [rule.needs for rule in rules if name in rule.names and not rule.met]
        if needs and getattr(scenario, name) is not False:
            found[name] = needs[0]
    return found


def _arrival_rules(s: Scenario, trace: TraceFormat | None) -> list[Rule]:
    recorded = trace in (TraceFormat.BURSTGPT, TraceFormat.MOONCAKE)
    falling = s.popularity in (Shape.POWER_LAW, Shape.SKEWED)
    return [
        Rule(TIMES, not recorded, "requests come at the trace's times"),
        Rule(("cv",), s.process is Process.GAMMA, "it needs --process gamma"),
        Rule(("on_seconds", "off_seconds", "off_rate"), s.pattern is Pattern.ON_OFF, "it needs --pattern on_off"),
        Rule(("ramp_rate",), s.pattern is Pattern.RAMP, "it needs --pattern ramp"),
        Rule(ADAPTERS, s.adapters > 0, "it needs --adapters above 0"),
        Rule(("exponent",), falling, "it needs --popularity power_law or skewed"),
        Rule(("trace_format",), trace is not None, "it needs --trace"),
        Rule(("trace_start", "trace_speed", "trace_rate"), recorded, "it needs a BurstGPT or Mooncake file as --trace"),
        Rule(("trace_model",), trace is TraceFormat.BURSTGPT, "it needs a BurstGPT file as --trace"),
    ]


def _content_rules(s: Scenario, trace: TraceFormat | None) -> list[Rule]:
    recorded = trace in (TraceFormat.BURSTGPT, TraceFormat.MOONCAKE)
    conversations = s.prompts is not None or trace is TraceFormat.SHAREGPT
    drawn = not recorded and not conversations
    made = s.prompt_lengths is not Lengths.TEXTS
    shapes = (s.prompt_lengths, s.output_lengths)
    return [
        Rule(PROMPTS, drawn, "prompts have the lengths of the file"),
        Rule(PROMPTS[1:], made, "it needs --prompt-lengths uniform or lognormal"),
        Rule(("median_prompt_tokens",), s.prompt_lengths is Lengths.LOGNORMAL, "it needs --prompt-lengths lognormal"),
        Rule(OUTPUTS, drawn, "answers have the lengths of the file"),
        Rule(("median_tokens",), s.output_lengths is Lengths.LOGNORMAL, "it needs --output-lengths lognormal"),
        Rule(("length_sigma",), Lengths.LOGNORMAL in shapes, "it needs --prompt-lengths or --output-lengths lognormal"),
        Rule(("vocab",), not conversations and (recorded or made), "it needs --prompt-lengths uniform or lognormal"),
        Rule(("max_total_tokens", "tokenizer"), conversations, "it needs a ShareGPT file as --prompts or --trace"),
    ]


def _job_rules(s: Scenario) -> list[Rule]:
    off = s.finetune is Finetuning.OFF
    rows = s.finetune_rows > 0
    return [
        Rule(("finetune",), s.adapters > 0 or off, "it needs --adapters above 0"),
        Rule(("finetune_rows", *JOBS), s.adapters > 0 or not rows, "it needs --adapters above 0"),
        Rule(("finetune_rows",), not off or not rows, "it needs --finetune bursts or always"),
        Rule(JOBS, not off, "it needs --finetune bursts or always"),
        Rule(JOBS, rows, "it needs --finetune-rows above 0"),
        Rule(("finetune_period",), s.finetune is Finetuning.BURSTS, "it needs --finetune bursts"),
        Rule(("finetune_jobs",), s.finetune is Finetuning.ALWAYS, "it needs --finetune always"),
        Rule(("epochs",), s.steps is None, f"jobs end after --steps {s.steps}"),
    ]


def _class_rules(s: Scenario) -> list[Rule]:
    return [
        Rule(("slo_batch_ttft", "slo_batch_tpot"), s.batch_share > 0, "it needs --batch-share above 0"),
        Rule(("slo_tpot", "slo_e2e"), s.batch_share < 1, "it needs --batch-share below 1"),
    ]
