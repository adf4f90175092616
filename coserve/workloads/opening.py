"""Opens the workload that the settings name: a coserve trace, a recording in another format, or a synthetic one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coserve.core.errors import InvalidRequest
from coserve.workloads.bundled import bundled_prompts, bundled_rows
from coserve.workloads.recordings import first_request, open_source, trace_format
from coserve.workloads.scenario import Scenario, TraceFormat, make_scenario
from coserve.workloads.synthesis import make_trace
from coserve.workloads.trace import PromptArrival, Trace, load_trace
from coserve.workloads.unused import unused_settings

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
    """Return the given settings without effect, each with what it needs (`unused.unused_settings`). Settings that
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
