"""Settings that have no effect beside the others are found, those with one are not."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from coserve.core.setting_sources import parse_setting
from coserve.workloads.presets import PRESETS
from coserve.workloads.scenario import Scenario, TraceFormat, make_scenario
from coserve.workloads.unused import all_rules, unused_settings

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
    assert {f.name for f in fields(Scenario)} == ruled | ALWAYS | {"adapters"}
    assert not ruled & ALWAYS
