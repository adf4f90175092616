"""Synthetic workloads: a scenario and its seed give a trace of arrivals, which can be saved and replayed.

The defaults are the synthetic workload of the ETS paper (section 5.2.1, table 5.1): a prompt every 0.1 s, and every 20 s
up to 512 rows to fine-tune on, all for one of 32 adapters of rank 32. The paper's fine-tuning request is one row; here
the rows of one burst that are for the same adapter are one job.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coserve.errors import EmptyCorpus, InvalidRequest, MalformedRow
from coserve.types import TrainingSettings, Wire
from coserve.workloads.arrivals import Arrivals, arrival_times
from coserve.workloads.popularity import Popularity, choices

T = TypeVar("T")

CORPORA = ("pirate", "recipes")
"""Bundled corpora that the default workload trains on."""


class Scenario(Wire, frozen=True, tag="scenario"):
    """A synthetic workload. Times in seconds."""

    seed: int = 0
    duration: float = 60.0
    """Arrivals come before this time; their answers may end after it."""
    arrivals: Arrivals = Arrivals()
    finetune_period: float = 20.0
    """Seconds from one burst of rows to the next, the first at 0."""
    finetune_rows: int = 512
    """Most rows of one burst; 0 switches fine-tuning off."""
    adapters: int = 32
    """0: every prompt is for the base, and nothing is fine-tuned."""
    rank: int = 32
    popularity: Popularity = Popularity()
    min_new_tokens: int = 16
    max_new_tokens: int = 64
    """`max_tokens` of a prompt is uniform between both bounds; EOS is ignored."""
    training: TrainingSettings = TrainingSettings(epochs=1)
    adapter_prefix: str = "load"

    def __post_init__(self) -> None:
        for name in ("duration", "finetune_period"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidRequest(f"expected a number above 0, got {value}", field=name)
        for name, low in (("finetune_rows", 0), ("adapters", 0), ("rank", 1), ("min_new_tokens", 1)):
            if getattr(self, name) < low:
                raise InvalidRequest(f"expected at least {low}, got {getattr(self, name)}", field=name)
        if self.max_new_tokens < self.min_new_tokens:
            raise InvalidRequest(
                f"expected at least min_new_tokens, {self.min_new_tokens}, got {self.max_new_tokens}",
                field="max_new_tokens",
            )

    @property
    def adapter_names(self) -> list[str]:
        """The most popular one first."""
        return [f"{self.adapter_prefix}-{i:02d}" for i in range(self.adapters)]


class PromptArrival(Wire, frozen=True, tag="prompt"):
    """A generation request that comes at `at`."""

    at: float
    index: int
    adapter: str | None
    prompt: str
    max_tokens: int
    seed: int


class FinetuneArrival(Wire, frozen=True, tag="finetune"):
    """A fine-tuning job that comes at `at`."""

    at: float
    index: int
    adapter: str
    rows: tuple[dict[str, Any], ...]


Arrival = PromptArrival | FinetuneArrival


class Trace(Wire, frozen=True):
    """All arrivals of a scenario, by time."""

    scenario: Scenario
    arrivals: tuple[Arrival, ...]

    @property
    def prompts(self) -> tuple[PromptArrival, ...]:
        return tuple(arrival for arrival in self.arrivals if isinstance(arrival, PromptArrival))

    @property
    def finetunes(self) -> tuple[FinetuneArrival, ...]:
        return tuple(arrival for arrival in self.arrivals if isinstance(arrival, FinetuneArrival))


def make_trace(scenario: Scenario, prompts: Sequence[str], rows: Sequence[dict[str, Any]]) -> Trace:
    """The trace of `scenario.seed`: prompts and rows are drawn with replacement.

    Prompts and fine-tuning draw from random streams of their own: a change to one leaves the other as it was.
    Raises `InvalidRequest` or `EmptyCorpus` where there is nothing to draw from.
    """
    if not prompts:
        raise InvalidRequest("expected at least one prompt", field="prompts")
    arrivals: list[Arrival] = [*_prompts(scenario, prompts)]
    if scenario.adapters and scenario.finetune_rows:
        if not rows:
            raise EmptyCorpus("expected at least one row to fine-tune on")
        arrivals += _finetunes(scenario, rows)
    return Trace(scenario=scenario, arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.at)))


def _prompts(scenario: Scenario, prompts: Sequence[str]) -> list[PromptArrival]:
    rng = random.Random(f"{scenario.seed}/prompts")
    names = scenario.adapter_names
    adapter = choices(scenario.popularity, scenario.adapters, random.Random(f"{scenario.seed}/adapters"))
    times = arrival_times(scenario.arrivals, scenario.duration, random.Random(f"{scenario.seed}/arrivals"))
    return [
        PromptArrival(
            at=at,
            index=index,
            adapter=names[next(adapter)] if names else None,
            prompt=rng.choice(prompts),
            max_tokens=rng.randint(scenario.min_new_tokens, scenario.max_new_tokens),
            seed=rng.getrandbits(32),
        )
        for index, at in enumerate(times)
    ]


def _finetunes(scenario: Scenario, rows: Sequence[dict[str, Any]]) -> list[FinetuneArrival]:
    rng = random.Random(f"{scenario.seed}/finetune")
    adapter = choices(scenario.popularity, scenario.adapters, rng)
    jobs: list[FinetuneArrival] = []
    for burst in range(math.ceil(scenario.duration / scenario.finetune_period)):
        batches: dict[int, list[dict[str, Any]]] = {}
        for _ in range(rng.randint(1, scenario.finetune_rows)):
            batches.setdefault(next(adapter), []).append(rng.choice(rows))
        jobs += [
            FinetuneArrival(
                at=burst * scenario.finetune_period,
                index=len(jobs) + i,
                adapter=scenario.adapter_names[chosen],
                rows=tuple(batch),
            )
            for i, (chosen, batch) in enumerate(batches.items())
        ]
    return jobs


def save_trace(trace: Trace, path: Path) -> None:
    """JSON lines: the scenario, then one line an arrival. Raises `InvalidRequest` where nothing can be written."""
    lines = [trace.scenario, *trace.arrivals]
    try:
        path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    except OSError as error:
        raise InvalidRequest(f"cannot write the trace to {str(path)!r}: {error.strerror}", field="save") from error


def load_trace(path: Path) -> Trace:
    """Raises `MalformedRow` (with the line) for anything that `save_trace` does not write, `InvalidRequest` for no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequest(f"cannot read the trace: {error.strerror}", field="trace") from error
    if not lines:
        raise MalformedRow("expected a scenario, got an empty file", line=1)
    arrivals: list[Arrival] = []
    scenario = _decode(lines[0], msgspec.json.Decoder(Scenario), 1)
    decoder: msgspec.json.Decoder[Arrival] = msgspec.json.Decoder(Arrival)
    for number, line in enumerate(lines[1:], 2):
        arrival = _decode(line, decoder, number)
        if arrivals and arrival.at < arrivals[-1].at:
            raise MalformedRow(
                f"expected arrivals in order of time, got {arrival.at} after {arrivals[-1].at}", line=number
            )
        arrivals.append(arrival)
    return Trace(scenario=scenario, arrivals=tuple(arrivals))


def _decode(line: bytes, decoder: msgspec.json.Decoder[T], number: int) -> T:
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise MalformedRow(str(error), line=number) from error


def bundled_prompts() -> list[str]:
    """Prompts that come with the package, in the manner of the paper's "act as a ..." collection."""
    text = resources.files("coserve").joinpath("assets/prompts.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def bundled_rows() -> list[dict[str, Any]]:
    """Rows to fine-tune on that come with the package."""
    folder = resources.files("coserve").joinpath("assets/corpora")
    texts = [folder.joinpath(f"{name}.jsonl").read_text(encoding="utf-8") for name in CORPORA]
    return [json.loads(line) for text in texts for line in text.splitlines()]
