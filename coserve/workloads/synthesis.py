"""Generates the arrivals of a scenario one at a time; none is kept in memory."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from coserve.core.errors import EmptyCorpus, InvalidRequest
from coserve.core.types import SloClass
from coserve.workloads.arrivals import arrival_times
from coserve.workloads.bounds import MAX_REQUESTS, MAX_TRAINING_ROWS, check_total
from coserve.workloads.distributions import Lengths, block_tokens, choices, draw_length, random_tokens, shares
from coserve.workloads.formats import Recorded
from coserve.workloads.recordings import Content, Source
from coserve.workloads.scenario import Finetuning, Scenario
from coserve.workloads.trace import Arrival, FinetuneArrival, PromptArrival, Repeatable, Trace


def make_trace(
    scenario: Scenario, prompts: Sequence[str], rows: Sequence[dict[str, Any]], source: Source | None = None
) -> Trace:
    """Return the trace for `scenario.seed`. Prompts and rows are drawn with replacement. `source`: recorded arrivals or
    contents.

    Prompts, adapters, arrivals and fine-tuning have separate random streams, so changing one leaves the others
    unchanged. Raises `InvalidRequest` or `EmptyCorpus` if there is nothing to draw from.
    """
    source = source or Source()
    if scenario.prompt_lengths is Lengths.TEXTS and not prompts and not source.has_contents:
        raise InvalidRequest("expected at least one prompt", field="prompts")
    trains = scenario.adapters and scenario.finetune_rows and scenario.finetune is not Finetuning.OFF
    if trains and not rows:
        raise EmptyCorpus("expected at least one row to fine-tune on")
    _check_requests(scenario, source)
    if trains:
        _check_rows(scenario)

    def arrivals() -> Iterator[Arrival]:
        jobs = _finetunes(scenario, rows) if trains else iter(())
        return heapq.merge(_prompts(scenario, prompts, source), jobs, key=lambda arrival: arrival.at)

    return Trace(scenario=scenario, arrivals=Repeatable(arrivals))


def _check_requests(scenario: Scenario, source: Source) -> None:
    """Raise `InvalidRequest` for too many requests."""
    if source.recorded is None:
        check_total(scenario.arrivals.most_expected(scenario.duration), MAX_REQUESTS, "requests", "duration")
    elif scenario.trace_rate is not None:
        check_total(scenario.trace_rate * scenario.duration, MAX_REQUESTS, "requests", "trace_rate")


def _check_rows(scenario: Scenario) -> None:
    """Raise `InvalidRequest` for too many fine-tuning rows."""
    if scenario.finetune is Finetuning.BURSTS:
        check_total(_burst_count(scenario) * scenario.finetune_rows, MAX_TRAINING_ROWS, "rows", "finetune_period")
    else:
        check_total(scenario.finetune_jobs * scenario.finetune_rows, MAX_TRAINING_ROWS, "rows", "finetune_jobs")


def _prompts(scenario: Scenario, prompts: Sequence[str], source: Source) -> Iterator[PromptArrival]:
    rng = random.Random(f"{scenario.seed}/prompts")
    names = scenario.adapter_names
    contents, classes = source.contents(), _classes(scenario)
    for index, (at, adapter, record) in enumerate(_requests(scenario, source)):
        content = next(contents) if contents is not None else None
        if content is None and record is not None:
            tokens = block_tokens(record.blocks, record.prompt_tokens, scenario.vocab, scenario.seed, rng)
            content = Content(tokens, record.output_tokens)
        content = content or _drawn(scenario, prompts, rng)
        yield PromptArrival(
            at=scenario.lead + at,
            index=index,
            adapter=names[adapter] if names else None,
            prompt=content.prompt,
            max_tokens=content.max_tokens,
            seed=rng.getrandbits(32),
            slo_class=next(classes),
        )


def _classes(scenario: Scenario) -> Iterator[SloClass | None]:
    """Yield classes endlessly; None if no request is to be of the class batch."""
    rng = random.Random(f"{scenario.seed}/classes")
    while True:
        batch = rng.random() < scenario.batch_share
        yield ("batch" if batch else "interactive") if scenario.batch_share else None


def _drawn(scenario: Scenario, prompts: Sequence[str], rng: random.Random) -> Content:
    """Draw a prompt and an answer's length from the scenario's distributions."""
    s = scenario
    prompt: str | tuple[int, ...]
    if s.prompt_lengths is Lengths.TEXTS:
        prompt = rng.choice(prompts)
    else:
        low, high = s.min_prompt_tokens, s.max_prompt_tokens
        length = draw_length(s.prompt_lengths, low, high, s.median_prompt_tokens, s.length_sigma, rng)
        prompt = random_tokens(length, s.vocab, rng)
    tokens = draw_length(s.output_lengths, s.min_tokens, s.max_tokens, s.median_tokens, s.length_sigma, rng)
    return Content(prompt, tokens)


def _requests(scenario: Scenario, source: Source) -> Iterator[tuple[float, int, Recorded | None]]:
    """Yield time, adapter and record of each request, by time."""
    if source.recorded is not None:
        return (
            (record.at, adapter, record)
            for record, adapter in zip(source.recorded(), _adapters(scenario), strict=False)
        )
    if scenario.per_adapter and scenario.adapters:
        each = enumerate(shares(scenario.distribution, scenario.adapters))
        return heapq.merge(*(_of_adapter(scenario, adapter, share) for adapter, share in each))
    times = arrival_times(scenario.arrivals, scenario.duration, random.Random(f"{scenario.seed}/arrivals"))
    return ((at, adapter, None) for at, adapter in zip(times, _adapters(scenario), strict=False))


def _of_adapter(scenario: Scenario, adapter: int, share: float) -> Iterator[tuple[float, int, None]]:
    rng = random.Random(f"{scenario.seed}/arrivals/{adapter}")
    return ((at, adapter, None) for at in arrival_times(scenario.arrivals, scenario.duration, rng, share=share))


def _adapters(scenario: Scenario) -> Iterator[int]:
    """Return endless adapters, drawn by popularity; only 0 if the scenario has none."""
    if not scenario.adapters:
        return itertools.repeat(0)
    return choices(scenario.distribution, scenario.adapters, random.Random(f"{scenario.seed}/adapters"))


def _finetunes(scenario: Scenario, rows: Sequence[dict[str, Any]]) -> Iterator[FinetuneArrival]:
    return _bursts(scenario, rows) if scenario.finetune is Finetuning.BURSTS else _jobs(scenario, rows)


def _burst_count(scenario: Scenario) -> int:
    return math.ceil(scenario.window[1] / scenario.finetune_period)


def _bursts(scenario: Scenario, rows: Sequence[dict[str, Any]]) -> Iterator[FinetuneArrival]:
    """Yield jobs every `finetune_period` until the arrival window ends; a burst's rows of one adapter form one job."""
    rng = random.Random(f"{scenario.seed}/finetune")
    adapter = choices(scenario.distribution, scenario.adapters, rng)
    names, index = scenario.adapter_names, itertools.count()
    for burst in range(_burst_count(scenario)):
        batches: dict[int, list[dict[str, Any]]] = {}
        for _ in range(rng.randint(1, scenario.finetune_rows)):
            batches.setdefault(next(adapter), []).append(rng.choice(rows))
        for chosen, batch in batches.items():
            at = burst * scenario.finetune_period
            yield FinetuneArrival(at=at, index=next(index), adapter=names[chosen], rows=tuple(batch))


def _jobs(scenario: Scenario, rows: Sequence[dict[str, Any]]) -> Iterator[FinetuneArrival]:
    """Yield `finetune_jobs` jobs at the start, for the adapters in turn."""
    rng = random.Random(f"{scenario.seed}/finetune")
    names = scenario.adapter_names
    for i in range(scenario.finetune_jobs):
        chosen = tuple(rng.choice(rows) for _ in range(scenario.finetune_rows))
        yield FinetuneArrival(at=0.0, index=i, adapter=names[i % len(names)], rows=chosen)
