"""Workloads of the papers' tables, as settings of `scenario.Scenario`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A preset. `settings`: values as text by name, as in a TOML file or on the command line. `source`: paper and
    section."""

    source: str
    settings: Mapping[str, str]


_ETS = {"process": "constant", "rate": "10", "finetune": "bursts", "finetune_period": "20", "finetune_rows": "512"}
_ETS |= {"adapters": "32", "rank": "32", "popularity": "uniform", "slo_e2e": "10", "slos": "10,60"}

_SLORA = {"duration": "300", "process": "gamma", "cv": "1", "per_adapter": "true", "popularity": "power_law"}
_SLORA |= {"exponent": "1", "prompt_lengths": "uniform", "min_prompt_tokens": "8", "max_prompt_tokens": "512"}
_SLORA |= {"output_lengths": "uniform", "min_tokens": "8", "max_tokens": "512", "finetune": "off", "slo_ttft": "6"}
_SLORA |= {"targets": "q_proj,k_proj,v_proj,o_proj"}
_S1, _S2, _S4 = {"rank": "8"}, {"rank": "64,32,16,8"}, {"rank": "64,32,16"}

_ALWAYS = {"finetune": "always", "finetune_rows": "128", "finetune_jobs": "16", "lead": "30"}
_LLAMA = {"temperature": "0", "vocab": "128256"}

PRESETS: dict[str, Preset] = {
    "ets-5.1": Preset("ETS, table 5.1: default parameters of the synthetic workload", _ETS),
    "ets-5.2": Preset("ETS, table 5.2: the load of table 5.1 for five minutes", _ETS | {"duration": "300"}),
    "slora-7b-a10g": Preset("S-LoRA, table 3, 7B @ A10G, ranks of S1", _SLORA | _S1 | {"adapters": "200", "rate": "2"}),
    "slora-7b-a100": Preset(
        "S-LoRA, table 3, 7B @ A100 (80G), ranks of S1", _SLORA | _S1 | {"adapters": "200", "rate": "10"}
    ),
    "slora-7b-a100-s2": Preset(
        "S-LoRA, table 3, 7B @ A100 (80G), ranks of S2", _SLORA | _S2 | {"adapters": "200", "rate": "10"}
    ),
    "slora-13b-a100-40g": Preset(
        "S-LoRA, table 3, 13B @ A100 (40G), ranks of S4", _SLORA | _S4 | {"adapters": "200", "rate": "2"}
    ),
    "slora-13b-a100": Preset(
        "S-LoRA, table 3, 13B @ A100 (80G), ranks of S4", _SLORA | _S4 | {"adapters": "400", "rate": "6"}
    ),
    "flexllm-8b": Preset(
        "FlexLLM's recipe for an 8B model on one GPU: with --trace BurstGPT.csv --trace-model ChatGPT --trace-rate "
        "1..5 and --prompts ShareGPT.json; without them a stand-in of ours: Gamma arrivals of cv 2, log-normal lengths",
        {
            "duration": "600",
            "process": "gamma",
            "cv": "2",
            "rate": "5",
            "prompt_lengths": "lognormal",
            "max_prompt_tokens": "4096",
            "output_lengths": "lognormal",
            "max_tokens": "2048",
            "max_total_tokens": "8192",
            "adapters": "1",
            "rank": "16",
            "row_tokens": "1024",
            "batch_tokens": "8192",
            "steps": "100",
            "slo_ttft": "5",
            "slo_tpot": "0.045",
        }
        | _ALWAYS
        | _LLAMA,
    ),
    "equal-8b": Preset(
        "Equal loads for coserve and its peers, an 8B model, targets of FlexLLM's recipe; jobs end and publish in the "
        "window",
        {
            "process": "poisson",
            "rate": "5",
            "prompt_lengths": "lognormal",
            "min_prompt_tokens": "1",
            "max_prompt_tokens": "2048",
            "output_lengths": "lognormal",
            "min_tokens": "1",
            "max_tokens": "1024",
            "adapters": "32",
            "rank": "16",
            "row_tokens": "512",
            "batch_tokens": "4096",
            "steps": "25",
            "slo_ttft": "5",
            "slo_tpot": "0.045",
        }
        | _ALWAYS
        | _LLAMA,
    ),
}
