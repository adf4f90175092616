"""Validation loss of LoRA and BD-LoRA at equal parameters, on the bundled base and on a CPU.

    OMP_NUM_THREADS=1 nice -n 10 python -m benchmarks.bdlora.quality
    python -m benchmarks.bdlora.quality --plot
    python -m benchmarks.bdlora.quality --tiny --out /tmp/tried

The setup is the BD-LoRA paper's (section 5.1, appendix C.1), made small: LoRA at all sites, rsLoRA's scaling with an
alpha of 16 for each block, AdamW, a linear schedule with a warm-up of 5%, a loss over held-out rows at the end. Each
adapter is trained by coserve's own training loop. All kinds see the same batches: the data order depends on the seed
alone, and the held-out rows on nothing.

`tuning`  each kind at some ranks, on a seed of its own: the rate with the lowest mean validation loss is the kind's
rate at every rank `final`   each kind, rank and seed at that rate

A BD-LoRA of N blocks gets the rank whose number of parameters is nearest to the LoRA's. (The paper's r (dH + dI) / (dH
+ dI/N) is the same count for one weight of the MLP; attention's weights have other shapes.) Each row is written when
its run is done; a run that has a row is not repeated. `--plot` draws the figure and puts `bd.quality.delta` into the
summary, from the committed rows.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.common.figures import panels
from benchmarks.common.options import RESULTS, make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results
from benchmarks.common.summary import update_summary
from coserve.core.training.jobs import JobSpec
from coserve.core.training.settings import Schedule, TrainingSettings
from coserve.core.training.step_metrics import StepMetrics
from coserve.core.types import BaseSpec, LoraSettings
from coserve.data.corpus.batch_plan import BatchPlan
from coserve.data.corpus.jsonl import parse_jsonl
from coserve.data.corpus.rows import Row
from coserve.data.corpus.tokenize import Tokenization, tokenize_rows
from coserve.data.corpus.tokenized import Corpus
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.finetune.init import new_adapter
from coserve.finetune.job_checkpoint import JobCheckpoints
from coserve.finetune.loop import TrainingLoop
from coserve.finetune.losses.loss import Loss
from coserve.finetune.micro_batch import MicroBatchRunner
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.passes.training_pass import TrainingPass
from coserve.finetune.sessions.session import SliceTimer, TrainingSession
from coserve.finetune.trainer import TrainingJob
from coserve.kernels.lora.backend import choose_backend
from coserve.lora.files.bdlora import blocks_at, packed_shapes
from coserve.lora.files.targets import resolve_targets
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.model.lora import LoraWeights
from coserve.state.folder import DataFolder

NAME, KEY = "bdlora_quality.json", "bd.quality.delta"
FIGURE = Path("docs/figures/bdlora_quality.png")
KINDS = {"lora": 1, "bd2": 2, "bd4": 4}
"""Blocks of each kind."""
FINAL, TUNING = "final", "tuning"
CORPORA = ("errands", "gardener", "lost_property", "pirate", "recipes")
HELD_OUT = 5
"""Every fifth row of each corpus is a validation row."""
ALPHA = 16.0
WARMUP = 0.05
MICRO_BATCH_TOKENS = 1024


@dataclass(frozen=True)
class Scale:
    ranks: tuple[int, ...] = (4, 8, 16, 32)
    """LoRA's; those of BD-LoRA follow from its parameters."""
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    tuning_ranks: tuple[int, ...] = (8, 32)
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    epochs: float = 3
    batch_tokens: int = 512


PAPER = Scale()
TRIED = Scale(ranks=(4,), seeds=(0, 1), tuning_ranks=(4,), rates=(2e-3,), epochs=0.2)


@dataclass(frozen=True)
class Case:
    """One run. `of_rank`: the rank of the LoRA that has as many parameters."""

    part: str
    kind: str
    of_rank: int
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.part}.{self.kind}.r{self.of_rank}.rate{self.rate:g}.seed{self.seed}"


class HeldOutPlan(BatchPlan):
    """Trains on all rows but the last `held`, and validates on those, whatever the seed."""

    def __init__(self, corpus: Corpus, held: int, training: TrainingSettings) -> None:
        super().__init__(corpus.lengths[:-held], training, MICRO_BATCH_TOKENS)
        self.lengths = corpus.lengths.astype(np.int32)  # of the held-out rows too
        self._held = (tuple(range(corpus.rows - held, corpus.rows)),)

    def validation(self) -> tuple[tuple[int, ...], ...]:
        return self._held


def read_corpus() -> tuple[Corpus, int]:
    """The bundled corpora, validation rows last, and the number of those."""
    kept, held = list[Row](), list[Row]()
    for name in CORPORA:
        content = (resources.files("coserve") / "assets" / "corpora" / f"{name}.jsonl").read_bytes()
        for number, row in enumerate(parse_jsonl(content), start=1):
            (kept if number % HELD_OUT else held).append(row)
    return tokenize_rows([*kept, *held], Tokenizer.load("bundled"), Tokenization(1024)), len(held)


def parameters(settings: LoraSettings, base: BaseSpec) -> int:
    """Stored numbers of an adapter: BD-LoRA's zeros do not count."""
    shapes = (
        packed_shapes(base.sites[site], settings.r, blocks_at(settings, site))
        for site in resolve_targets(settings, base)
    )
    return sum(math.prod(shape) for both in shapes for shape in both)


def settings_of(case: Case, base: BaseSpec) -> LoraSettings:
    """rsLoRA's scaling with an alpha of 16 for each block of rank r/N, as the paper's independent LoRAs have it."""
    blocks = KINDS[case.kind]
    plain = LoraSettings(r=case.of_rank, alpha=ALPHA * math.sqrt(blocks), rslora=True, bd_blocks=blocks)
    wanted = parameters(LoraSettings(r=case.of_rank), base)
    ranks = range(blocks, blocks * case.of_rank + 1, blocks)
    return min(
        (msgspec.structs.replace(plain, r=rank) for rank in ranks),
        key=lambda settings: abs(parameters(settings, base) - wanted),
    )


def train(case: Case, scale: Scale, base: Base, corpus: Corpus, held: int) -> list[StepMetrics]:
    """The metrics of every step; those of the last step of each epoch have the validation loss."""
    lora = settings_of(case, base.spec)
    training = TrainingSettings(
        epochs=scale.epochs,
        batch_tokens=scale.batch_tokens,
        learning_rate=case.rate,
        schedule=Schedule.LINEAR,
        seed=case.seed,
    )
    plan = HeldOutPlan(corpus, held, training)
    training = msgspec.structs.replace(
        training,
        warmup_steps=math.ceil(WARMUP * plan.total_steps),
        eval_steps=math.ceil(plan.total_steps / scale.epochs),
    )
    start = new_adapter(lora, base.spec, seed=case.seed, dtype=torch.float32, device="cpu")
    return run_job(case.key, training, plan, start, base, corpus)


def run_job(
    name: str, training: TrainingSettings, plan: BatchPlan, start: LoraWeights, base: Base, corpus: Corpus
) -> list[StepMetrics]:
    """Train an adapter from `start` to the end by coserve's own loop; the metrics of every step."""
    spec = JobSpec(
        id=name,
        adapter="quality",
        version=1,
        init_from=None,
        lora=start.settings,
        training=training,
        rows=corpus.rows,
        tokens=corpus.token_count,
        target_tokens=corpus.target_tokens,
    )
    timer, device = SliceTimer(time.perf_counter), base.device
    optimizer = AdapterOptimizer(start, base.spec, training, base.dtype, device)
    session = TrainingSession(
        optimizer,
        seed=training.seed,
        dropout=start.settings.dropout,
        neftune_alpha=None,
        device=device,
        timer=timer,
    )
    loop = TrainingLoop(spec, corpus, plan, session, Loss())
    job = TrainingJob(loop, JobCheckpoints(DataFolder(Path()), base.spec, loop, keep=1))  # none is saved
    runner, backend = MicroBatchRunner(base, recompute=False), choose_backend("auto", device, base.dtype)
    found: list[StepMetrics] = []
    while not job.loop.finished:
        one = TrainingPass([job], runner, backend, device)
        one.advance(None)
        for _, error in one.errors:
            raise error
        found += [metrics for _, metrics in one.metrics]
    return found


def run(case: Case, scale: Scale, base: Base, corpus: Corpus, held: int, results: Results) -> None:
    """Train a case and write its row, unless it has one."""
    if any(row["case"] == asdict(case) for row in results.rows()):
        return
    began = time.process_time()
    steps = train(case, scale, base, corpus, held)
    curve = [round(step.valid_loss, 5) for step in steps if step.valid_loss is not None]
    lora = settings_of(case, base.spec)
    about = {
        "case": asdict(case),
        "rank": lora.r,
        "blocks": lora.bd_blocks,
        "alpha": round(lora.alpha or 0, 4),
        "parameters": parameters(lora, base.spec),
        "steps": len(steps),
        "validation_curve": curve,
        "train_loss": round(steps[-1].loss, 5),
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    results.put(case.key, curve[-1], "nats/token", about=about)


def tuning_cases(scale: Scale) -> Iterator[Case]:
    for rank, kind, rate in itertools.product(scale.tuning_ranks, KINDS, scale.rates):
        yield Case(TUNING, kind, rank, rate, scale.tuning_seed)


def best_rate(rows: Sequence[dict[str, Any]], kind: str, scale: Scale) -> float:
    """The rate of a kind whose mean validation loss over the tuning ranks is the lowest."""
    found = [row for row in rows if row["case"]["part"] == TUNING and row["case"]["kind"] == kind]
    means = {
        rate: statistics.mean(row["value"] for row in found if row["case"]["rate"] == rate) for rate in scale.rates
    }
    return min(means, key=lambda rate: means[rate])


def final_cases(scale: Scale, rows: Sequence[dict[str, Any]]) -> Iterator[Case]:
    rates = {kind: best_rate(rows, kind, scale) for kind in KINDS}
    for seed, rank, kind in itertools.product(scale.seeds, scale.ranks, KINDS):
        yield Case(FINAL, kind, rank, rates[kind], seed)


@dataclass(frozen=True)
class Comparison:
    """Losses in nats per token; differences are BD-LoRA minus LoRA, seed by seed."""

    delta: float
    """Mean over kinds of BD-LoRA, ranks and seeds."""
    noise: float
    """Standard deviation of one run's loss over seeds: the root of its mean variance over kinds and ranks."""
    delta_by_seed: dict[int, float]
    cells: list[dict[str, Any]]
    """One for each kind and rank: mean and standard deviation over seeds, and the mean difference from LoRA."""


def compare(rows: Sequence[dict[str, Any]]) -> Comparison:
    found = [row for row in rows if row["case"]["part"] == FINAL]
    loss = {(row["case"]["kind"], row["case"]["of_rank"], row["case"]["seed"]): row["value"] for row in found}
    parameter_counts = {
        (row["case"]["kind"], row["case"]["of_rank"]): (row["rank"], row["parameters"]) for row in found
    }
    seeds = sorted({seed for _, _, seed in loss})
    cells = []
    for (kind, of_rank), (rank, count) in sorted(parameter_counts.items(), key=lambda item: (item[0][1], item[1][0])):
        losses = [loss[kind, of_rank, seed] for seed in seeds]
        differences = [loss[kind, of_rank, seed] - loss["lora", of_rank, seed] for seed in seeds]
        cells.append(
            {
                "kind": kind,
                "of_rank": of_rank,
                "rank": rank,
                "parameters": count,
                "mean": round(statistics.mean(losses), 5),
                "std": round(statistics.stdev(losses), 5),
                "delta": round(statistics.mean(differences), 5),
                "delta_std": round(statistics.stdev(differences), 5),
            }
        )
    by_seed = {
        seed: statistics.mean(
            value - loss["lora", rank, seed]
            for (kind, rank, of), value in loss.items()
            if of == seed and kind != "lora"
        )
        for seed in seeds
    }
    return Comparison(
        delta=round(statistics.mean(by_seed.values()), 5),
        noise=round(math.sqrt(statistics.mean(cell["std"] ** 2 for cell in cells)), 5),
        delta_by_seed={seed: round(value, 5) for seed, value in by_seed.items()},
        cells=cells,
    )


def publish(out: Path = RESULTS, figure: Path = FIGURE) -> None:
    """Draw the figure and update `bd.quality.delta`, from the rows in `out`."""
    record = msgspec.json.decode((out / NAME).read_bytes())
    rows = list(record["rows"].values())
    found = compare(rows)
    draw(found.cells, figure)
    latest = max(rows, key=lambda row: row["date"])
    more = {"noise": found.noise, "by_seed": found.delta_by_seed, "cells": found.cells}
    value = found.delta, "nats/token", "within noise", latest
    update_summary(out, "bdlora/quality.py", NAME, {KEY: value}, {KEY: more})


def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    title = "The bundled base; mean and standard deviation of 3 seeds"
    with panels(path, 1, 1, (6, 4), title) as ((axes,),):
        for kind, blocks in KINDS.items():
            own = [cell for cell in cells if cell["kind"] == kind]
            axes.errorbar(
                [cell["parameters"] for cell in own],
                [cell["mean"] for cell in own],
                yerr=[cell["std"] for cell in own],
                marker="o",
                capsize=3,
                label="LoRA" if blocks == 1 else f"BD-LoRA, {blocks} blocks",
            )
        axes.set(xscale="log", xlabel="parameters", ylabel="validation loss, nats/token")
        axes.grid(alpha=0.3)
        axes.legend()


def main() -> None:
    parser = make_parser(__doc__, tiny="few steps, to try the script")
    parser.add_argument("--plot", action="store_true", help="draw the figure, put the key in summary.json, and stop")
    given = parser.parse_args()
    if given.plot:
        publish()
        return
    scale = TRIED if given.tiny else PAPER
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    base = load_base("bundled", device="cpu", dtype="float32")
    corpus, held = read_corpus()
    validation_tokens = int(np.sum(corpus.target[corpus.bounds[-held - 1] :]))
    results = Results.of(
        given,
        NAME,
        __file__,
        asdict(scale)
        | {
            "alpha_per_block": ALPHA,
            "rslora": True,
            "warmup": WARMUP,
            "dtype": "float32",
            "rows": corpus.rows - held,
            "tokens": int(corpus.bounds[-held - 1]),
            "validation_rows": held,
            "validation_targets": validation_tokens,
        },
        seed=scale.seeds[0],
        hardware=cpu_name(),
    )
    for case in tuning_cases(scale):
        run(case, scale, base, corpus, held, results)
    for case in final_cases(scale, results.rows()):
        run(case, scale, base, corpus, held, results)
    found = compare(results.rows())
    print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())


if __name__ == "__main__":
    main()
