"""Loads and systems of the ETS paper's section 5.2: what `benchmarks/ets/measure.py` measures, and how long it
takes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coserve.workloads.bundled import bundled_prompts, bundled_rows
from coserve.workloads.distributions import choices
from coserve.workloads.scenario import Finetuning, Scenario, make_scenario
from coserve.workloads.synthesis import make_trace
from coserve.workloads.trace import FinetuneArrival, Repeatable, Trace

CHARACTERS = 4
"""Of a row's text for each of its tokens: more than are needed, the daemon cuts rows."""
GPT2_MEDIUM = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Sizes:
    """Of the base, the systems' batches and the rows. Section 5.2.2: fine-tuning batches of 32 rows, inference batches
    of at most 64 requests, dispatched when they are full or 5 s after their first request.
    """

    model: dict[str, object] | None
    """config.json; None: the bundled base."""
    targets: tuple[str, ...]
    device: str
    dtype: str
    kv_tokens: int
    batch_requests: int = 64
    delay: float = 5.0
    batch_rows: int = 32
    row_tokens: int = 480
    """About the paper's: TS(5)'s 12,324 tokens/s are 512 rows of 481 tokens each 20 s."""
    adapters: int = 32
    rank: int = 32
    step_rows: int = 8
    """Of an optimizer step where a burst is a job for each adapter: four make up a batch."""

    @property
    def batch_tokens(self) -> int:
        return self.batch_rows * self.row_tokens


PAPER = Sizes(GPT2_MEDIUM, ("c_attn", "c_proj"), "cuda", "bfloat16", 65_536)
TINY = Sizes(None, (), "cpu", "auto", 8192, 8, 0.5, 2, 32, 2, 4, 1)


@dataclass(frozen=True)
class Load:
    """Table 5.1. `rate`: requests a second, 1 / T_inference; `rows`: N_fine-tune, of each burst; `period`:
    T_fine-tune."""

    seconds: float
    rate: float = 10.0
    rows: int = 512
    period: float = 20.0
    by_adapter: bool = False
    """A burst's rows are drawn for all adapters, one job each, which mixed batches join; else they are one job."""
    answers: int | None = None
    """Tokens of every answer; None: 16 to 64."""


@dataclass(frozen=True)
class Cell:
    """One load on one system. `name`: of its row, after the system's."""

    part: str
    name: str
    load: Load

    @property
    def expected(self) -> float:
        """Seconds, if the system keeps up."""
        return self.load.seconds + 6.0


def cells(*, tiny: bool) -> list[Cell]:
    """In the order in which they are measured.

    `table`: table 5.2; `answers`: its load with answers of 20 tokens, transformers' default length when the paper was
    written; `mixed`: with one job for each adapter of a burst; `figure`: figure 5.2, by the size of fine-tuning
    requests; `rates`: requests and rows a second together, up to 64 times the table's.
    """
    if tiny:
        load = Load(4.0, 4.0, 4, 2.0)
        return [
            Cell("table", "table52", load),
            Cell("answers", "answers20", replace(load, answers=2)),
            Cell("mixed", "mixed", replace(load, by_adapter=True)),
            Cell("figure", "rows8", replace(load, rows=8)),
            Cell("rates", "x2", replace(load, rate=8.0, rows=8)),
        ]
    table, shorter = Load(60.0), Load(40.0)
    return [
        Cell("table", "table52", table),
        Cell("answers", "answers20", replace(table, answers=20)),
        Cell("mixed", "mixed", replace(table, by_adapter=True)),
        *(Cell("figure", f"rows{rows}", replace(shorter, rows=rows)) for rows in (128, 2048, 4096)),
        *(
            Cell("rates", f"x{factor}", replace(shorter, rate=10.0 * factor, rows=512 * factor))
            for factor in (4, 8, 16, 32, 64)
        ),
    ]


def warm_up_load(sizes: Sizes, *, tiny: bool) -> Load:
    """Before anything is measured: a batch that waits for `delay`, then one that is full, and two batches of
    training."""
    return Load(1.0 if tiny else 8.0, 8.0, 2 * sizes.batch_rows, 20.0)


@dataclass(frozen=True)
class System:
    """A policy with a backend of the LoRA terms. `targets`: TTFT and TPOT of the daemon, in seconds."""

    name: str
    policy: str
    n: int | None
    backend: str
    targets: tuple[float, float]
    delay: float | None = None
    """`inference_delay` in seconds; None: the paper's 5."""

    def settings(self, device: str) -> dict[str, object]:
        """Of the daemon. Without a GPU the backend is the one that needs none."""
        backend = self.backend if device == "cuda" else "auto"
        found: dict[str, object] = {"policy": self.policy, "lora_backend": backend}
        found |= {"slo_ttft": self.targets[0], "slo_tpot": self.targets[1]}
        found |= {} if self.delay is None else {"inference_delay": self.delay}
        return found if self.n is None else found | {"ts_n": self.n}


POLICIES = ("slack", "ets", "ts5", "ts10", "ts20", "spatial", "overlap")
BACKENDS = ("segmented", "block_sparse")


def known_policies(*, gpu: bool) -> tuple[str, ...]:
    """Those of `POLICIES` that can run: some launch slices on a GPU's stream."""
    return tuple(name for name in POLICIES if gpu or name not in ("spatial", "overlap"))


def system(policy: str, backend: str, targets: tuple[float, float], label: str = "") -> System:
    """`policy`: a name of `POLICIES`; with `+SECONDS` an inference delay of its own, such as `ets+1`. `label` begins
    the system's name."""
    name = ".".join(filter(None, (label, "" if backend == BACKENDS[0] else backend, policy)))
    policy, _, delay = policy.partition("+")
    plain = policy.rstrip("0123456789")
    n = int(policy.removeprefix(plain)) if plain != policy else None
    return System(name, plain, n, backend, targets, float(delay) if delay else None)


def serve_settings(sizes: Sizes, model: Path | str, data: Path, cache: Path) -> dict[str, object]:
    """Settings of the daemon that all systems share."""
    return {
        "model": model,
        "data_dir": data,
        "cache_dir": cache,
        "device": sizes.device,
        "dtype": sizes.dtype,
        "load_format": "auto" if sizes.model is None else "dummy",
        "kv_tokens": sizes.kv_tokens,
        "inference_batch_size": sizes.batch_requests,
        "inference_delay": sizes.delay,
        "micro_batch_tokens": sizes.batch_tokens,
        "max_queue": 1 << 15,
        "max_connections": 1 << 15,
        "max_jobs": 1 << 10,
        "max_body_bytes": 1 << 29,  # rows of a burst at 64 times the load
    }


def load_trace_of(load: Load, sizes: Sizes, seed: int = 0) -> Trace:
    """The arrivals of a load: the preset's prompts, and every `period` seconds exactly `rows` rows."""
    scenario = make_scenario(
        {
            "preset": "ets-5.1",
            "seed": seed,
            "duration": load.seconds,
            "rate": load.rate,
            "finetune": Finetuning.OFF,
            "adapters": sizes.adapters,
            "rank": (sizes.rank,),
            "targets": sizes.targets,
            "finetune_rows": load.rows,
            "finetune_period": load.period,
            "row_tokens": sizes.row_tokens,
            "batch_tokens": (sizes.step_rows if load.by_adapter else sizes.batch_rows) * sizes.row_tokens,
            "slos": (1.0, 10.0, 60.0),
        }
        | ({} if load.answers is None else {"min_tokens": load.answers, "max_tokens": load.answers})
    )
    prompts = make_trace(scenario, bundled_prompts(), ())
    jobs = list(_bursts(scenario, load))
    return Trace(scenario, Repeatable(lambda: heapq.merge(prompts.arrivals, jobs, key=lambda arrival: arrival.at)))


def _bursts(scenario: Scenario, load: Load) -> Iterator[FinetuneArrival]:
    rng = random.Random(f"{scenario.seed}/bursts")
    assert scenario.row_tokens is not None, "the load says how long rows are"
    texts = [row["text"][: scenario.row_tokens * CHARACTERS] for row in bundled_rows(scenario.row_tokens)]
    names, drawn = scenario.adapter_names, choices(scenario.distribution, scenario.adapters, rng)
    at, index = 0.0, 0
    while at < load.seconds:
        rows = [{"text": rng.choice(texts)} for _ in range(load.rows)]
        owners = [next(drawn) for _ in rows] if load.by_adapter else [next(drawn)] * load.rows
        for owner in dict.fromkeys(owners):
            own = tuple(row for row, each in zip(rows, owners, strict=True) if each == owner)
            yield FinetuneArrival(at=at, index=index, adapter=names[owner], rows=own)
            index += 1
        at += load.period


def offered_tok_s(load: Load, sizes: Sizes) -> float:
    """Fine-tuning tokens that come a second."""
    return load.rows * sizes.row_tokens / load.period


def expected_seconds(systems: Sequence[System], chosen: Sequence[Cell], together: int) -> float:
    """Of a run with warm caches: 45 s a start of `together` daemons, 20 s for each one's adapters and warm-up."""
    starts = -(-len(systems) // together)
    return 45.0 * starts + len(systems) * (20.0 + sum(cell.expected for cell in chosen))
