"""Fine-tuning by coserve and by PEFT on one GPU, in one run: tokens a second, memory, and where the time goes.

    python -m benchmarks.finetuning.measure --out benchmarks/results [--budget 900] [--only coserve/8x512,peft_compiled]
    python -m benchmarks.finetuning.measure --publish [FOLDER/finetuning.json ...]     (takes these in, puts the keys \
        in summary.json)
    python -m benchmarks.finetuning.measure --tiny --out /tmp/tried

A Llama-3-8B shape, and GPT-2 medium's, with random weights in bfloat16; one adapter of rank 16 on all sites; AdamW,
gradients clipped to a norm of 1; rows of one length, the same in the same order for all sides.

- `coserve`: the daemon's trainer (`benchmarks/ets/figure_5_1_trainer.py`) with a job, or several that share forwards
- `peft`: PEFT and transformers as they are
- `peft_compiled`: each decoder layer compiled for the batch's shape, cross-entropy in chunks of 1024 tokens of which
  only the gradient of the hidden states is kept (`benchmarks/finetuning/with_peft.py`)
- `peft_graphs`: the same with torch's CUDA graphs (`mode="reduce-overhead"`), one row of 512 tokens alone

`ROWSxLENGTH` is one job's optimizer step in one forward, `NjobsROWSxLENGTH` the steps of N jobs at once, 16 rows in one
forward at most. A base is loaded once for all cases of a side that follow one another. Each row is written as soon as
it is measured; what does not fit is recorded as such. The time of the first steps, with all that compiles, is not part
of the measure (`warm_s`; before that, loading a case's jobs and compiling the daemon's layers: `load_s`).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.options import make_parser
from benchmarks.common.results import Results, Target, merge_results
from benchmarks.ets.figure_5_1_trainer import TooLittleMemory, forget_compiled
from benchmarks.finetuning import cases as finetuning_cases
from benchmarks.finetuning.cases import (
    COSTS,
    GPT2_MEDIUM,
    LLAMA,
    PEFT_MODES,
    RANK,
    RECOMPUTED,
    SEED,
    TINY_GPT2,
    TINY_LLAMA,
    Case,
    Shape,
    Turn,
    expected_seconds,
    key,
    turns,
)
from benchmarks.finetuning.cut import cut_cost
from benchmarks.finetuning.ours import make_base, recomputed, running_jobs, slice_times, suspended
from benchmarks.finetuning.profile import profiled
from benchmarks.finetuning.report import FILE, publish
from benchmarks.finetuning.with_peft import PeftSide
from coserve.core.errors import JobOutOfMemory
from coserve.model.base import Base

SLOWDOWN = Target(0.03, most=True)
SLICE_MS = Target(15.0, most=True)
TARGETS = {
    f"finetune.{quantity}.{case}": Target(value, most=quantity == "gib")
    for case, tok_s, gib in (
        ("8x512", 15_500, 33),
        ("16x512", 16_000, 48),
        ("4x512", 15_000, 26),
        ("1x512", 8_500, 19),
        ("8x512.recompute", 12_000, 21),
        ("8jobs1x512", 14_000, None),
    )
    for quantity, value in (("tok_s", tok_s), ("gib", gib))
    if value is not None
}
"""Of the 8B shape on an H200."""
GIB = 1 << 30


class Measured:
    """Batches that were timed."""

    def __init__(self, train: Callable[[int], int], *, warm: int, steps: int, gpu: bool) -> None:
        """`train` runs one and returns its tokens."""
        self.seconds, self.speeds, self._gpu = list[float](), list[float](), gpu
        began = time.perf_counter()
        for run in range(warm):
            train(run)
        self._synchronize()
        self.warm_s = time.perf_counter() - began
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()  # what only compiling took
            torch.cuda.reset_peak_memory_stats()
            train(warm)  # not timed: the allocator asks for its memory again
        for run in range(steps):
            self._synchronize()
            began = time.perf_counter()
            tokens = train(warm + 1 + run)
            self._synchronize()
            self.seconds.append(time.perf_counter() - began)
            self.speeds.append(tokens / self.seconds[-1])
        self.allocated = (torch.cuda.max_memory_allocated() + graph_bytes()) / GIB if gpu else None
        self.reserved = torch.cuda.max_memory_reserved() / GIB if gpu else None

    def _synchronize(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()


def graph_bytes() -> int:
    """What CUDA graphs hold for their next replay, of which torch's allocator knows no tensor."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    pools = [segment for segment in segments if segment["segment_pool_id"] != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in pools)


class Benchmark:
    """Measures turns; each result is written as soon as it is there."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self._options, self._results = options, results
        self._known = results.keys() if options.skip_measured else set[str]()
        self._deadline = time.monotonic() + options.budget
        self.failed = list[str]()

    def run(self, turn: Turn) -> None:
        """All cases of a turn, on a base of its own."""
        options = self._options
        shape = (TINY_GPT2 if turn.gpt2 else TINY_LLAMA) if options.tiny else (GPT2_MEDIUM if turn.gpt2 else LLAMA)
        todo = [case for case in turn.cases if self._wanted(turn.side, case, shape)]
        if not todo:
            return
        began = time.perf_counter()
        ours = turn.side not in PEFT_MODES
        side = make_base(shape) if ours else PeftSide(shape, PEFT_MODES[turn.side])
        loaded = round(time.perf_counter() - began, 1)
        print(f"{turn.side}: {shape.name} was loaded in {loaded} s", flush=True)
        for case in todo:
            if self._wanted(turn.side, case, shape):
                self._case(turn.side, side, shape, case)

    def _wanted(self, side: str, case: Case, shape: Shape) -> bool:
        """It was not measured, and there is time for it."""
        name = f"{side}/{case.name}"
        first = key(side, "suspend_cost" if case.group == COSTS else "tok_s", case)
        if first in self._known:
            return False
        if (
            time.monotonic() + expected_seconds(side, case, shape, self._options.steps, self._options.warm)
            > self._deadline
        ):
            print(f"no time is left for {name}", flush=True)
            return False
        return True

    def _case(self, name: str, side: Base | PeftSide, shape: Shape, case: Case) -> None:
        own = finetuning_cases.tiny(case) if self._options.tiny else case
        try:
            if isinstance(side, PeftSide):
                self._peft(name, side, shape, case, own)
            elif case.group == COSTS:
                self._costs(name, side, shape, own)
            else:
                self._jobs(name, side, shape, case, own)
        except (torch.OutOfMemoryError, JobOutOfMemory, TooLittleMemory) as error:
            about = {"side": name, "case": case.name, "oom": str(error).splitlines()[0][:200]}
            self._results.put(key(name, "tok_s", case), 0.0, "tok/s", about=about)
        except Exception as error:  # noqa: BLE001 - the other cases go on
            self.failed.append(f"{name}/{case.name}: {error!r}"[:500])
            print(f"failed: {self.failed[-1]}", flush=True)
        gc.collect()
        if shape.device == "cuda":
            torch.cuda.empty_cache()

    def _jobs(self, name: str, base: Base, shape: Shape, case: Case, own: Case) -> None:
        gpu, began = shape.device == "cuda", time.perf_counter()
        with running_jobs(base, shape, own) as jobs:
            about = {"recomputed": recomputed(shape, own), "load_s": round(time.perf_counter() - began, 1)}
            measured = Measured(jobs.train, warm=self._options.warm, steps=self._options.steps, gpu=gpu)
            self._put(name, shape, case, own, measured, about)
            found = profiled(base, jobs, 1e3 * statistics.median(measured.seconds))
            if found is not None:
                self._put(name, shape, case, own, measured, about | {"profile": found})

    def _peft(self, name: str, side: PeftSide, shape: Shape, case: Case, own: Case) -> None:
        train = side.stepper(own)
        gpu = shape.device == "cuda"
        self._put(
            name, shape, case, own, Measured(train, warm=self._options.warm, steps=self._options.steps, gpu=gpu), {}
        )

    def _put(
        self, name: str, shape: Shape, case: Case, own: Case, measured: Measured, about: Mapping[str, Any]
    ) -> None:
        """The rows of a case. `own`: what was run for it."""
        speed = statistics.median(measured.speeds)
        shared = {"side": name, "case": case.name, "base": shape.name, "tokens": own.tokens, "jobs": own.jobs}
        row = shared | {
            "step_ms": round(1e3 * statistics.median(measured.seconds), 3),
            "tflop_s": round(speed * _flop(name, shape, own) / 1e12, 2),
            "warm_s": round(measured.warm_s, 1),
        }
        if measured.allocated is not None and measured.reserved is not None:
            memory = {"gib_allocated": round(measured.allocated, 3), "gib_reserved": round(measured.reserved, 3)}
            row |= memory
            place = key(name, "gib", case)
            self._results.put(place, memory["gib_allocated"], "GiB", TARGETS.get(place), about=shared | memory)
        self._results.put(
            key(name, "tok_s", case),
            round(speed, 1),
            "tok/s",
            TARGETS.get(key(name, "tok_s", case)),
            [round(each, 1) for each in measured.speeds],
            row | dict(about),
        )

    def _costs(self, name: str, base: Base, shape: Shape, own: Case) -> None:
        prefix, about = finetuning_cases.KEYS[name], {"side": name, "base": shape.name, "tokens": own.tokens}
        times, longest = slice_times(base, shape, own)
        by_kind = {"longest_ms": {kind.value: round(ms, 3) for kind, ms in longest.items()}}
        self._results.put(
            f"{prefix}.slice_ms.max", round(statistics.median(times), 3), "ms", SLICE_MS, times, about | by_kind
        )
        shares = cut_cost(base, shape, own)
        self._results.put(f"{prefix}.cut_cost", round(statistics.median(shares), 4), "share", SLOWDOWN, shares, about)
        shares, times_suspended = suspended(base, shape, own)
        self._results.put(
            f"{prefix}.suspend_cost",
            round(statistics.median(shares), 4),
            "share",
            SLOWDOWN,
            shares,
            about | {"suspensions": times_suspended},
        )


def _flop(side: str, shape: Shape, case: Case) -> float:
    """Of a token. coserve computes some layers again, but for their last GEMM; PEFT all."""
    if side in PEFT_MODES:
        return shape.flop(recompute=case.recompute)
    return shape.flop(recompute=RECOMPUTED * case.recompute, without_last=shape.device == "cuda")


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, tiny="small shapes on the CPU, to try the script")
    parser.add_argument(
        "--only", default="", help="sides, cases, groups (sizes, jobs, costs, gpt2), SIDE/CASE or SIDE/GROUP"
    )
    parser.add_argument("--steps", type=int, default=8, help="measured batches of a case")
    parser.add_argument("--warm", type=int, default=3, help="batches ahead of those")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no case may end")
    parser.add_argument("--skip-measured", action="store_true", help="leave out cases that --out has already")
    parser.add_argument("--list", action="store_true", help="show what would be measured, with rough upper estimates")
    parser.add_argument("--publish", nargs="*", type=Path, help="take in these results, put the keys in summary.json")
    options = parser.parse_args()
    if options.publish is not None:
        return options
    options.only = frozenset(options.only.split(",")) - {""}
    if unknown := options.only - set(finetuning_cases.names()):
        parser.error(f"--only: expected sides and cases that --list shows, got {', '.join(sorted(unknown))}")
    options.turns = turns(options.only)
    return options


def main() -> None:
    options = parse()
    if options.publish is not None:
        for file in options.publish:
            merge_results(file)
        publish()
        return
    if options.list:
        for turn in options.turns:
            for case in turn.cases:
                shape = GPT2_MEDIUM if turn.gpt2 else LLAMA
                seconds = expected_seconds(turn.side, case, shape, options.steps, options.warm)
                print(f"{turn.side}/{case.name}: {seconds:.0f} s")
        return
    results = Results.of(
        options,
        FILE,
        __file__,
        {"rank": RANK, "warm": options.warm, "steps": options.steps},
        seed=SEED,
    )
    benchmark = Benchmark(options, results)
    for turn in options.turns:
        benchmark.run(turn)
        forget_compiled()
        torch._dynamo.reset()  # compiled code holds the base, too
        gc.collect()
        if not options.tiny:
            torch.cuda.empty_cache()
    if benchmark.failed:
        sys.exit("\n".join(["failed:", *benchmark.failed]))


if __name__ == "__main__":
    main()
