"""Predicted and measured peaks of GPU memory, over random mixes of jobs, adapters that serve and running sequences.

    python -m benchmarks.memory.mixes --out /tmp/found --seconds 230       (on a GPU)
    for i in 1 2 3 4 5 6 7 8; do python -m benchmarks.memory.mixes --seed $i --out /tmp/found/$i --seconds 500 & done;
    wait   (on a GPU) python -m benchmarks.memory.mixes --publish /tmp/found/*/memory_mixes.json
    python -m benchmarks.memory.mixes --tiny --mixes 4 --out /tmp/tried    (a small shape; where there is no GPU on \
        fake tensors)

The base has the shapes of Llama 3 8B in four layers, with its vocabulary, in bfloat16 with random weights. Its profile
is measured as at the daemon's start, and on a GPU jobs run compiled layers, whose costs are measured then
(`--own-layers`: the base's own; CUDA graphs of layers, whose memory torch does not count, are left out). Each mix has
one to four jobs of random rank, targets, size and loss positions, and prompts of several adapters. The ledger admits
the jobs, as in the daemon: with smaller micro-batches or recomputation where they need them, or not at all. Then all
jobs are in memory, each computes a micro-batch, and while that is suspended with all it keeps, a generation step runs
over the prompts. torch may allocate no more than was planned and the margin, so a wrong prediction runs out of memory.

Errors are of the whole peak, and of the part that the mix adds to the base and the pool.
"""

from __future__ import annotations

import gc
import json
import random
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common.options import make_parser
from benchmarks.common.provenance import command, commit, versions
from benchmarks.memory.place import Place, place
from benchmarks.memory.report import NAME, publish, summary
from coserve.admission.ledger import Ledger, Shortage
from coserve.admission.memory import MARGIN
from coserve.admission.micro_batch import MicroBatchShape, lora_layers, micro_batch_bytes
from coserve.admission.recompute_plan import JobMemory, Option, job_memory
from coserve.admission.shapes import lora_shapes
from coserve.core.gpu_memory import LinearBytes, MemoryModel, TrainingCosts
from coserve.core.training.jobs import JobSpec
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.init import zero_adapter
from coserve.finetune.memory_limits import StepRecompute
from coserve.finetune.memory_profiling import Conditions, MemoryProfiler
from coserve.finetune.micro_batch import MicroBatchRunner, run_to_end
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.packed_rows import PackedRows
from coserve.generate.schedule import SCORED_TOKENS
from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.lora.segments import Segments
from coserve.memory.kv import KvCache
from coserve.memory.plan import Work
from coserve.memory.profile import fit
from coserve.memory.profile import sizes as profiled_sizes
from coserve.model.base import Base, wrap_base
from coserve.model.groups import share_inputs
from coserve.model.layers import LayerCut
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.model.training.compiled_layers import CompiledLayers

RANKS = (8, 16, 32, 64, 128)
PAGE_TOKENS, ROW = 16, 512
GIB = 1 << 30
CONFIG: dict[str, int] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TINY = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Sizes:
    config: dict[str, int]
    micro_batch: int
    step: int
    running: int
    training: int
    """Bytes for jobs."""


FULL = Sizes(CONFIG, micro_batch=2048, step=2048, running=64, training=6 * GIB)
SMALL = Sizes(TINY, micro_batch=1024, step=256, running=4, training=GIB // 4)


@dataclass(frozen=True)
class Mix:
    """Jobs, each with the positions of its loss, and the tokens of the prompts of each adapter that serves."""

    jobs: tuple[JobSpec, ...]
    prompts: tuple[int, ...]
    ranks: tuple[int, ...]
    """Of the adapters that serve."""


def random_mix(rng: random.Random, sizes: Sizes, targets: Sequence[str]) -> Mix:
    """Between one and four jobs, up to eight adapters that serve."""
    jobs = tuple(_random_job(f"job-{i}", rng, sizes, targets) for i in range(rng.randint(1, 4)))
    adapters = rng.randint(1, min(8, sizes.running))
    prompts = tuple(rng.randint(1, sizes.step // adapters) for _ in range(adapters))
    return Mix(jobs, prompts, tuple(rng.choice(RANKS) for _ in prompts))


def _random_job(id: str, rng: random.Random, sizes: Sizes, targets: Sequence[str]) -> JobSpec:
    chosen = tuple(rng.sample(list(targets), rng.randint(1, len(targets))))
    tokens = rng.randint(sizes.micro_batch // 8, sizes.micro_batch)
    return JobSpec(
        id=id,
        adapter=id,
        version=1,
        init_from=None,
        lora=LoraSettings(r=rng.choice(RANKS), targets=chosen),
        training=TrainingSettings(
            batch_tokens=sizes.micro_batch,
            steps=1,
            early_stopping_patience=rng.choice((None, 3)),
            validation_split=0.1,
        ),
        rows=1,
        tokens=tokens,
        target_tokens=rng.randint(16, tokens - tokens // ROW - 1),
        longest=min(ROW, tokens),
    )


class Machine:
    """A base with its page pool, and what was measured of it."""

    def __init__(self, where: Place, sizes: Sizes, *, compiled: bool) -> None:
        """`compiled`: jobs run compiled layers."""
        self.where, self.sizes = where, sizes
        with where.device:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes.config), dtype=torch.bfloat16)
        self.base: Base = wrap_base(model, name="llama")
        share_inputs(self.base)
        work = Work(sizes.step, sizes.micro_batch, jobs=4)
        conditions = Conditions(where.backend, False, sizes.running, PAGE_TOKENS, work)
        layers = CompiledLayers(self.base, LayerCut(self.base)) if compiled else None
        if layers is not None:
            layers.compile()
        profiler = MemoryProfiler(
            self.base,
            where.meter,
            conditions,
            attention=where.training_attention,
            updates=where.measured,
            compiled=layers,
        )
        self.step_line: LinearBytes = fit([(tokens, profiler.step(tokens)) for tokens in profiled_sizes(sizes.step)])
        self.costs: TrainingCosts = profiler.costs(sizes.micro_batch)
        self.runner = MicroBatchRunner(self.base, recompute=False, attention=where.training_attention, compiled=layers)
        self.kv = KvCache.for_base(self.base, 2 * sizes.step, PAGE_TOKENS)
        self.model = MemoryModel(costs=self.costs, training=sizes.training)

    # ---- predicted

    def predict(self, mix: Mix, jobs: Sequence[tuple[JobSpec, JobMemory, Option]], held: int) -> int:
        """Peak bytes, `held` of which are there before the jobs."""
        step = self.step_line.at(sum(mix.prompts))
        peaks = [step]
        for spec, _, option in jobs:
            tokens = option.recompute_plan.tokens
            batch = MicroBatchShape(tokens, _positions(spec, tokens), option.recompute_plan.recomputed)
            shapes, base = lora_shapes(spec.lora, self.base.spec), self.base.spec
            layers = lora_layers(self.costs, shapes, base.dtype, dropout=False)
            found = micro_batch_bytes(self.costs, base, layers, batch)
            peaks += [found.peak, found.kept + step]
        return held + sum(memory.state.total for _, memory, _ in jobs) + max(peaks)

    # ---- measured

    def run(self, mix: Mix, jobs: Sequence[tuple[JobSpec, JobMemory, Option]]) -> tuple[int, int]:
        """Bytes held before the jobs, and the peak."""
        meter = self.where.meter
        serving = self._adapters(mix)
        gc.collect()
        held = meter.now()
        meter.reset()
        optimizers = [self._optimizer(spec) for spec, _, _ in jobs]
        self._step(mix, serving)
        for (spec, _, option), optimizer in zip(jobs, optimizers, strict=True):
            self._micro_batch(spec, option, optimizer, lambda: self._step(mix, serving))
            if self.where.measured:
                optimizer.step(targets=1, learning_rate=0.0)
        return held, meter.peak()

    def _zeros(self, settings: LoraSettings, dtype: torch.dtype) -> LoraWeights:
        return zero_adapter(settings, self.base.spec, dtype=dtype, device=self.where.device)

    def _optimizer(self, spec: JobSpec) -> AdapterOptimizer:
        start = self._zeros(spec.lora, torch.float32)
        return AdapterOptimizer(start, self.base.spec, spec.training, self.base.dtype)

    def _adapters(self, mix: Mix) -> tuple[LoraWeights, ...]:
        """Those that serve; in the daemon they lie in pages of the pool, here beside it."""
        return tuple(self._zeros(LoraSettings(r=rank), self.base.dtype) for rank in mix.ranks)

    @torch.no_grad()
    def _step(self, mix: Mix, serving: tuple[LoraWeights, ...]) -> None:
        base, bounds, runs, first = self.base, [0], list[TokenRun](), 0
        for tokens in mix.prompts:
            pages = -(-tokens // PAGE_TOKENS)
            runs.append(TokenRun(tokens, 0, tuple(range(first, first + pages))))
            first += pages
            bounds.append(bounds[-1] + tokens)
        segments = Segments(tuple(bounds), tuple(range(len(serving))))
        index_T = torch.arange(bounds[-1], device=base.device)
        keep = torch.arange(self.sizes.running + SCORED_TOKENS, device=base.device) % bounds[-1]
        lora = LoraBatch(segments, serving, self.where.backend)
        attention = self.where.paged_attention(self.kv, runs)
        positions_T = torch.cat([torch.arange(tokens, device=base.device) for tokens in mix.prompts])
        logits = base.forward(index_T % base.spec.vocab, positions_T, attention, lora=lora, keep=keep)
        logits[: self.sizes.running].float().log_softmax(-1)

    def _micro_batch(
        self, spec: JobSpec, option: Option, optimizer: AdapterOptimizer, beside: Callable[[], None]
    ) -> None:
        tokens, device = option.recompute_plan.tokens, self.where.device
        bounds = (*range(0, tokens, ROW), tokens)
        index_T = torch.arange(tokens, device=device)
        positions = _positions(spec, tokens)
        rows = PackedRows(
            index_T % self.base.spec.vocab, index_T % ROW, bounds, index_T[:positions], index_T[:positions]
        )
        lora = LoraBatch(Segments((0, tokens), (0,)), (optimizer.weights(),), self.where.backend)
        steps = self.runner.forward_backward(
            rows, lora, optimizer.trainable, optimizer.grads, how=StepRecompute(option.recompute_plan.recomputed)
        )
        while next(steps) is not MicroStep.BACKWARD:
            pass
        beside()  # all that the micro-batch keeps is there
        run_to_end(steps)


def _positions(spec: JobSpec, tokens: int) -> int:
    return min(spec.target_tokens, tokens)


def admit(machine: Machine, mix: Mix, planned: int) -> tuple[list[tuple[JobSpec, JobMemory, Option]], list[Shortage]]:
    """The jobs that start, and why others do not."""
    ledger, started, held = Ledger(planned), list[tuple[JobSpec, JobMemory, Option]](), list[Shortage]()
    for spec in mix.jobs:
        memory = job_memory(spec, machine.base.spec, machine.model, machine.sizes.micro_batch)
        found = ledger.admit(spec.id, memory)
        if isinstance(found, Option):
            started.append((spec, memory, found))
        else:
            held.append(found)
    return started, held


def measure(given: Namespace) -> dict[str, Any]:
    """All mixes."""
    plan, began = SMALL if given.tiny else FULL, time.monotonic()
    rng, rows, out_of_memory = random.Random(given.seed), list[dict[str, Any]](), 0
    with place(torch.bfloat16, measured=torch.cuda.is_available()) as where:
        machine = Machine(where, plan, compiled=where.measured and not given.own_layers)
        targets = machine.base.spec.default_targets
        held = machine.where.meter.now()
        cap = _cap(machine, held)
        print(f"{time.monotonic() - began:6.1f} s  base and profile measured", flush=True)
        while len(rows) < given.mixes and time.monotonic() - began < given.seconds:
            mix = random_mix(rng, plan, targets)
            jobs, waiting = admit(machine, mix, rng.choice((plan.training, plan.training // 3)))
            try:
                before, peak = machine.run(mix, jobs)
            except torch.OutOfMemoryError:
                before = peak = 0
            if not peak or peak > cap:
                out_of_memory += 1
            if peak:
                rows.append(_row(machine, mix, jobs, waiting, before, peak))
            else:
                where.free()
            if len(rows) % 100 == 0:
                print(f"{time.monotonic() - began:6.1f} s  {len(rows)} mixes", flush=True)
        device = torch.cuda.get_device_name() if where.measured else "none: fake tensors"
    head, note = (given.commit, None) if given.commit else commit()
    run = {"commit": head, "command": command("benchmarks.memory.mixes"), "script": "benchmarks/memory/mixes.py"}
    run |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": str(round(time.monotonic() - began, 1))}
    run |= {} if note is None else {"note": note}
    found: dict[str, Any] = {"run": run, "device": device, "measured": where.measured, "versions": versions()}
    found |= {"layers": "own" if given.own_layers or not where.measured else "compiled"}
    found |= {"base": plan.config, "held": held, "planned_for_jobs": plan.training, "cap": cap}
    found |= {"costs": msgspec.to_builtins(machine.costs), "step": msgspec.to_builtins(machine.step_line)}
    return found | {"summary": summary(rows, out_of_memory), "mixes": rows}


def _cap(machine: Machine, held: int) -> int:
    """Bytes that torch may have: what is held, a step, the jobs' and the margin."""
    most = max(RANKS) / 16 * 8  # adapters that serve lie beside the pool here
    serving = int(
        most * sum(16 * 2 * (site.in_features + site.out_features) for site in machine.base.spec.sites.values())
    )
    cap = held + machine.step_line.at(machine.sizes.step) + machine.sizes.training + serving + MARGIN
    if machine.where.measured:
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    return cap


def _row(
    machine: Machine,
    mix: Mix,
    jobs: Sequence[tuple[JobSpec, JobMemory, Option]],
    waiting: Sequence[Shortage],
    before: int,
    peak: int,
) -> dict[str, Any]:
    expected = machine.predict(mix, jobs, before)
    return {
        "jobs": [
            [spec.lora.r, len(spec.lora.targets or ()), option.recompute_plan.tokens, option.recompute_plan.recomputed]
            for spec, _, option in jobs
        ],
        "waiting": len(waiting),
        "refused": sum(shortage.never for shortage in waiting),
        "step": sum(mix.prompts),
        "before": before,
        "predicted": expected,
        "measured": peak,
        "error": round(expected / peak - 1, 5),
        "error_of_mix": round((expected - before) / max(peak - before, 1) - 1, 5),
    }


def main() -> None:
    parser = make_parser(__doc__, tiny="a small shape, to try the script")
    parser.add_argument("--mixes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=230.0, help="no mix begins after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the mixes; each process has one of its own")
    parser.add_argument("--own-layers", action="store_true", help="jobs run the base's own layers")
    parser.add_argument(
        "--publish", nargs="+", type=Path, help="take in these results, put the keys in summary.json, and stop"
    )
    given = parser.parse_args()
    if given.publish is not None:
        publish(given.publish)
        return
    found = measure(given)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / NAME).write_text(json.dumps(found) + "\n")
    print(json.dumps(found["summary"], indent=1))


if __name__ == "__main__":
    main()
