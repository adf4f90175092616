"""The settings of a workload, declared once: options of `coserve bench`, keys of its TOML file, first line of a trace.

Precedence: command line, then the TOML file of `--workload`, then the preset, then the defaults below. The defaults are
the synthetic workload of the ETS paper (section 5.2.1, table 5.1): a prompt every 0.1 s, and every 20 s up to 512 rows
to fine-tune on, all for one of 32 adapters of LoRA rank 32. The paper's fine-tuning request is one row; here the rows
of one burst for the same adapter form one job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from coserve.core.errors import InvalidRequest
from coserve.core.names import ADAPTER_RULE, is_adapter_name
from coserve.core.options import grouped, option, parse_setting, read_settings
from coserve.core.training.settings import TrainingSettings
from coserve.workloads.arrivals import Arrivals, Pattern, Process
from coserve.workloads.bounds import SETTINGS, check_bounds
from coserve.workloads.distributions import FIRST_ID, Lengths, Popularity, Shape


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


class Finetuning(StrEnum):
    BURSTS = "bursts"
    """Every `finetune_period` seconds up to `finetune_rows` rows arrive, as in the ETS paper."""
    ALWAYS = "always"
    """`finetune_jobs` jobs arrive at the start, enough to keep training until the end."""
    OFF = "off"


class TraceFormat(StrEnum):
    AUTO = "auto"
    """Detect the format by the file's beginning."""
    COSERVE = "coserve"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    SHAREGPT = "sharegpt"


SECTIONS = {
    "preset": "Workload",
    "process": "Arrivals",
    "adapters": "Adapters",
    "prompt_lengths": "Prompts and answers",
    "trace": "Recorded traces",
    "finetune": "Fine-tuning",
    "batch_share": "Classes and limits of a good answer",
}
"""Maps the first setting of each section to the section's title."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Settings of a workload. Times in seconds, rates in requests per second, lengths in tokens."""

    preset: str | None = option(
        None, f"start from a workload of a paper, whose other settings the options change: {', '.join(PRESETS)}"
    )
    seed: int = option(0, "the same seed gives the same workload")
    duration: float = option(60.0, "seconds in which requests arrive: the arrival window")
    lead: float = option(
        0.0, "seconds before the arrival window in which only fine-tuning runs; its speed there is taken as its peak"
    )

    process: Process = option(Process.CONSTANT, "gaps between requests: equal, exponential, or Gamma with --cv")
    rate: float = option(10.0, "requests a second")
    cv: float = option(
        1.0, "gamma: coefficient of variation of the gaps; 1 is Poisson, above it requests come in bursts"
    )
    per_adapter: bool = option(
        False, "each adapter has an arrival process of its own, its rate by popularity (S-LoRA), instead of one for all"
    )
    pattern: Pattern = option(
        Pattern.STEADY, "the rate over time: steady, switched on and off, or a ramp from --rate to --ramp-rate"
    )
    on_seconds: float = option(10.0, "on_off: seconds at --rate")
    off_seconds: float = option(10.0, "on_off: seconds at --off-rate")
    off_rate: float = option(0.0, "on_off: requests a second between the bursts")
    ramp_rate: float = option(0.0, "ramp: requests a second at the end")

    adapters: int = option(32, "adapters that requests and rows are spread over; 0: requests for the base alone")
    rank: tuple[int, ...] = option((32,), "rank of the adapters; several ranks are given to the adapters in turn")
    targets: tuple[str, ...] = option(
        (), "linear modules that the adapters change, such as q_proj,v_proj; default: all"
    )
    popularity: Shape = option(
        Shape.UNIFORM, "how often each adapter is asked for; power_law is Zipf's law, skewed what Punica calls Zipf-1.5"
    )
    exponent: float = option(1.5, "power_law and skewed: how steeply the popularity falls")
    adapter_prefix: str = option("load", "beginning of the adapters' names")

    prompt_lengths: Lengths = option(
        Lengths.TEXTS,
        "prompts: whole texts (bundled, or of --prompts), or random token ids of uniform or lognormal length",
    )
    min_prompt_tokens: int = option(8, "least tokens of a generated prompt")
    max_prompt_tokens: int = option(512, "most tokens of a generated prompt")
    median_prompt_tokens: float = option(160.0, "lognormal: median tokens of a generated prompt")
    output_lengths: Lengths = option(
        Lengths.UNIFORM, "lengths of the answers; EOS is ignored", choices=(Lengths.UNIFORM, Lengths.LOGNORMAL)
    )
    min_tokens: int = option(16, "least new tokens of a request (at most --max-tokens)")
    max_tokens: int = option(64, "most new tokens of a request")
    median_tokens: float = option(180.0, "lognormal: median of the new tokens")
    length_sigma: float = option(0.7, "lognormal: standard deviation of the logarithm of lengths")
    vocab: int = option(4096, f"token ids of generated prompts are from {FIRST_ID} up to this number")
    temperature: float = option(1.0, "sampling temperature; 0: greedy, to compare servers")

    trace: str | None = option(
        None,
        "replay this file: one that --save wrote, or arrivals and lengths of a BurstGPT, Mooncake or ShareGPT file",
    )
    trace_format: TraceFormat = option(TraceFormat.AUTO, "format of --trace")
    trace_start: float = option(0.0, "BurstGPT, Mooncake: skip this many seconds of the recording")
    trace_speed: float = option(1.0, "BurstGPT, Mooncake: play the recording this many times as fast")
    trace_rate: float | None = option(
        None, "BurstGPT, Mooncake: drop or repeat recorded requests to reach this many a second on average"
    )
    trace_model: str | None = option(None, "BurstGPT: only the rows of this model, such as ChatGPT")
    prompts: str | None = option(None, "ShareGPT file that gives the prompts and the lengths of the answers")
    max_total_tokens: int | None = option(None, "leave out conversations of more tokens, prompt and answer together")
    tokenizer: str = option("bundled", "folder or hub name of the tokenizer that counts the tokens of conversations")

    finetune: Finetuning = option(Finetuning.BURSTS, "fine-tuning rows come in bursts, train always, or not at all")
    finetune_period: float = option(20.0, "bursts: seconds from one burst to the next, the first at 0")
    finetune_rows: int = option(512, "bursts: most rows of a burst, 0 for none; always: rows of a job")
    finetune_jobs: int = option(16, "always: jobs, all there at the start")
    row_tokens: int | None = option(None, "tokens of each row (longer texts are cut)")
    steps: int | None = option(None, "optimizer steps of a job, instead of --epochs")
    epochs: float = option(1.0, "passes of a job over its rows")
    batch_tokens: int = option(2048, "tokens of an optimizer step")
    learning_rate: float = option(2e-4, "peak learning rate of a job")
    checkpoint_steps: int = option(20, "optimizer steps from one checkpoint of a job to the next")

    batch_share: float = option(
        0.0, "share of the requests that are of the class batch; above 0, the others are sent as interactive ones"
    )
    slo_ttft: float | None = option(None, "most seconds to the first token (TTFT)")
    slo_tpot: float | None = option(None, "most seconds per token after the first (TPOT)")
    slo_e2e: float | None = option(None, "most seconds to the last token (E2E)")
    slo_batch_ttft: float | None = option(None, "--slo-ttft for requests of the class batch")
    slo_batch_tpot: float | None = option(None, "--slo-tpot for requests of the class batch; they have no --slo-e2e")
    slos: tuple[float, ...] = option(
        (10.0, 60.0), "limits on the time to the last token, in seconds; the share of requests within each is reported"
    )

    def __post_init__(self) -> None:
        check_bounds({name: getattr(self, name) for name in SETTINGS}, SETTINGS)
        if not self.rank:
            raise InvalidRequest("expected at least one rank, got none", field="rank")
        last = self._adapter_name(max(self.adapters - 1, 0))
        if not is_adapter_name(last):
            raise InvalidRequest(f"expected {ADAPTER_RULE}, got {last[:80]!r}", field="adapter_prefix")
        if self.output_lengths is Lengths.TEXTS:
            raise InvalidRequest("expected uniform or lognormal, got texts", field="output_lengths")
        if self.preset is not None and self.preset not in PRESETS:
            raise InvalidRequest(f"expected one of {', '.join(PRESETS)}, got {self.preset!r}", field="preset")
        _ = self.arrivals, self.distribution  # their values are checked on construction

    @property
    def arrivals(self) -> Arrivals:
        names = [name for name in Arrivals.__struct_fields__ if name != "process"]
        return Arrivals(process=self.process, **{name: getattr(self, name) for name in names})

    @property
    def distribution(self) -> Popularity:
        return Popularity(shape=self.popularity, exponent=self.exponent)

    @property
    def training(self) -> TrainingSettings:
        """Return the training settings of every job."""
        return TrainingSettings(
            steps=self.steps,
            epochs=None if self.steps is not None else self.epochs,
            batch_tokens=self.batch_tokens,
            max_length=self.row_tokens,
            learning_rate=self.learning_rate,
            checkpoint_steps=self.checkpoint_steps,
        )

    @property
    def adapter_names(self) -> list[str]:
        """Return the adapters' names, the most popular one first."""
        return [self._adapter_name(i) for i in range(self.adapters)]

    def _adapter_name(self, adapter: int) -> str:
        return f"{self.adapter_prefix}-{adapter:02d}"

    def rank_of(self, adapter: int) -> int:
        return self.rank[adapter % len(self.rank)]

    @property
    def window(self) -> tuple[float, float]:
        """Return beginning and end of the arrival window, in seconds after the start."""
        return self.lead, self.lead + self.duration


def sections() -> dict[str, list[str]]:
    """Return section titles with their settings' names."""
    return grouped(Scenario, SECTIONS)


def given_settings(given: Mapping[str, object], file: Path | None = None) -> dict[str, object]:
    """Merge the settings of the TOML file and the command line (`given`, only options that were given); the command
    line takes precedence.

    Raises `ConfigError` for an unknown key or a value of the wrong type.
    """
    return ({} if file is None else read_settings(Scenario, file, "workload")) | dict(given)


def make_scenario(given: Mapping[str, object]) -> Scenario:
    """Build the scenario; `given` overrides its preset, which overrides the defaults. Raises `InvalidRequest` for an
    invalid value."""
    preset = given.get("preset")
    known = PRESETS.get(str(preset))
    base = {} if known is None else known.settings
    settings: dict[str, Any] = {name: parse_setting(Scenario, name, text) for name, text in base.items()} | dict(given)
    return Scenario(**settings)
