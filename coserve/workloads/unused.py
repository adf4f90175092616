"""Settings of a workload that have no effect in combination with the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from coserve.workloads.arrivals import Pattern, Process
from coserve.workloads.lengths import Lengths
from coserve.workloads.popularity import Shape
from coserve.workloads.scenario import Finetuning, Scenario, TraceFormat

TIMES = ("process", "rate", "cv", "per_adapter", "pattern", "on_seconds", "off_seconds", "off_rate", "ramp_rate")
PROMPTS = ("prompt_lengths", "min_prompt_tokens", "max_prompt_tokens", "median_prompt_tokens")
OUTPUTS = ("output_lengths", "min_tokens", "max_tokens", "median_tokens", "length_sigma")
ADAPTERS = ("rank", "targets", "popularity", "exponent", "adapter_prefix", "per_adapter")
TRAINING = ("row_tokens", "steps", "epochs", "batch_tokens", "learning_rate", "checkpoint_steps")
JOBS = ("finetune_period", "finetune_jobs", *TRAINING)


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
