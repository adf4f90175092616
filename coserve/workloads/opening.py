"""From settings to the workload they name: a trace of ours, a recording of another format, or a synthetic one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coserve.errors import InvalidRequest
from coserve.workloads.bundled import bundled_prompts, bundled_rows
from coserve.workloads.recordings import format_of, open_source
from coserve.workloads.scenario import Scenario, TraceFormat, make_scenario
from coserve.workloads.synthesis import make_trace
from coserve.workloads.trace import Trace, load_trace

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
"""The settings that do not change what is sent: they may be given with a trace that has settings of its own."""


def open_workload(given: Mapping[str, object]) -> Trace:
    """The workload of the settings that were given (`scenario.given_settings`); files are read when it is iterated.

    Raises `InvalidRequest` for settings that contradict each other, `MalformedRow` for a file of no known format.
    """
    scenario = make_scenario(given)
    if scenario.trace is not None:
        found = scenario.trace_format
        found = format_of(Path(scenario.trace)) if found is TraceFormat.AUTO else found
        if found is TraceFormat.COSERVE:
            return _with_limits(load_trace(Path(scenario.trace)), given)
    trace = make_trace(scenario, bundled_prompts(), bundled_rows(scenario.row_tokens), open_source(scenario))
    return Trace(_without_folders(scenario), trace.arrivals)


def _with_limits(trace: Trace, given: Mapping[str, object]) -> Trace:
    if others := sorted(set(given) - BESIDE_A_TRACE):
        raise InvalidRequest(f"the trace has settings of its own: expected no {', '.join(others)}", field="trace")
    limits: dict[str, Any] = {name: value for name, value in given.items() if name.startswith("slo")}
    return Trace(dataclasses.replace(trace.scenario, **limits), trace.arrivals)


def _without_folders(scenario: Scenario) -> Scenario:
    """As it is saved: where the files lie is nobody else's business."""
    return dataclasses.replace(
        scenario,
        trace=scenario.trace and Path(scenario.trace).name,
        prompts=scenario.prompts and Path(scenario.prompts).name,
        tokenizer=Path(scenario.tokenizer).name,
    )
