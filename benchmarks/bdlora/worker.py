"""One rank of `bdlora/measure.py`: its parts of the bases, adapters and executors. Every rank gets the same calls in
the same order."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.bdlora.case import Sizes, make_adapter, make_base
from benchmarks.bdlora.messages import all_reduce_us
from benchmarks.bdlora.plan import BATCHES, SHAPES, STEP_TOKENS, Load, Shape, Strategy, Variant
from benchmarks.bdlora.profile import profiled
from benchmarks.bdlora.schedule import Schedule
from benchmarks.bdlora.train import compiled_runner, train_steps
from benchmarks.bdlora.warm_tasks import WarmTask, gemm_paths, rows_of, wait_for
from coserve.core.errors import NonFiniteLoss
from coserve.core.types import AdapterRef
from coserve.finetune.micro_batch import MicroBatchRunner
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.graph_sizes import graph_rank
from coserve.generate.execution.interface import StepExecutor
from coserve.kernels.attention.interface import KvShape
from coserve.kernels.gpu.launcher import compile_only
from coserve.kernels.lora.backend import choose_backend
from coserve.memory.buffer import page_layout
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.gemm_choice import MEASURED, GemmChoice, load_gemms, measure_gemms, save_gemms
from coserve.model.lora import LoraWeights
from coserve.model.parallel.join import join
from coserve.model.parallel.mesh import Mesh

PAGE_TOKENS = 16
JOIN_SECONDS = 120.0
GIB = 1 << 30
RESERVE = 14 * GIB
"""Of a GPU's memory, for adapters, graphs and activations, where layers are counted that fit."""
PROFILED, PROFILED_TRAIN = 20, 2
"""Steps under the profiler."""
WARM_STEPS, DECODE_STEPS = 6, {"8b": 40, "70b": 16, "tiny": 4, "tiny_large": 4}
KV_TOKENS = 64 * (1024 + 128) + 4096
"""The largest load."""


@dataclass
class Model:
    """One base and what runs its steps."""

    shape: Shape
    """With the layers that it really has."""
    base: Base
    fused: FusedBase
    kv: KvCache
    eager: EagerExecutor
    graphs: GraphExecutor | None = None
    """Runs steps as graphs, once there were some; each in the graph for its own rank, never in a wider one."""
    traffic: dict[object, dict[str, float]] = field(default_factory=dict)
    """Collectives and bytes of a decode step, by kind of adapter and batch."""
    runner: MicroBatchRunner | None = None
    """Of optimizer steps, once there were some."""
    forwards: int = 0
    """Calls of the fused forward; a replayed graph calls none."""


class Worker:
    """The calls of the parent, by name. Times are this rank's: collectives keep the ranks together."""

    def __init__(self, mesh: Mesh, device: torch.device, folder: Path, *, tiny: bool) -> None:
        """`folder`: of the choices of GEMMs (`warm_tasks`)."""
        self._mesh, self._device, self._folder, self._tiny = mesh, device, folder, tiny
        self._models: dict[str, Model] = {}
        self._sequences = 0
        self._adapters: tuple[tuple[str, Variant, int], list[LoraWeights], Sizes] | None = None

    @classmethod
    def joining(cls, rank: int, size: int, address: str, folder: Path, *, tiny: bool) -> Worker:
        """One of the ranks that find each other at `address`."""
        torch.set_num_threads(1)
        device = torch.device("cpu") if tiny else torch.device("cuda", rank)
        if not tiny:
            torch.cuda.set_device(rank)
        mesh = join(rank, size, address=address, device=device, timeout=JOIN_SECONDS)
        return cls(mesh, device, folder, tiny=tiny)

    def hardware(self) -> dict[str, Any]:
        """What the results say of the machine, and which all-reduce small messages take."""
        name = "CPU, a tiny shape" if self._tiny else torch.cuda.get_device_name()
        return {"hardware": f"{self._mesh.size} x {name}", "mesh": type(self._mesh).__name__}

    def build(self, model: str) -> dict[str, float | int]:
        """Makes the base `SHAPE` (this rank's part) or `SHAPE@1` (the whole), compiles its layers; seconds by part."""
        name, alone = model.partition("@")[0], model.endswith("@1")
        mesh, began, seconds = Mesh() if alone else self._mesh, time.perf_counter(), dict[str, float]()

        def lap(part: str) -> None:
            nonlocal began
            self._synchronize()
            seconds[part], began = round(time.perf_counter() - began, 2), time.perf_counter()

        shape = self._fitting(SHAPES[name], mesh)
        base = self._base(shape, mesh)
        lap("weights")
        if self._tiny:
            fused = FusedBase(base, compiled=False)
        else:
            fused = FusedBase(base, gemms=GemmChoice())
            torch.cuda.empty_cache()  # matrices that were stacked
            fused.gemms = load_gemms(gemm_paths(self._folder, model), fused.stacked, self._device) or measure_gemms(
                fused.stacked, self._device, rows_of(model)
            )
            lap("gemms")
        fused.check()
        lap("compilation")
        self._models[model] = self._model(shape, base, fused)
        gc.collect()
        gc.freeze()  # as the engine does
        lap("pages")
        return {**seconds, "layers": shape.layers, "layers_of_shape": SHAPES[name].layers}

    @torch.no_grad()
    def _base(self, shape: Shape, mesh: Mesh) -> Base:
        return make_base(shape, mesh, self._device)

    @torch.no_grad()
    def _model(self, shape: Shape, base: Base, fused: FusedBase) -> Model:
        kv = KvCache.for_base(base, 4096 if self._tiny else KV_TOKENS, PAGE_TOKENS)
        for pages in (*kv.views.keys, *kv.views.values):
            pages[:-1].normal_()
        backend = choose_backend("auto", base.device, base.dtype)
        made = Model(shape, base, fused, kv, EagerExecutor(base, kv, backend))
        self._count_forwards(made)
        return made

    def warm(self, task: WarmTask, threads: int) -> None:
        """Compiles what the task says, on so many threads, over some of the base's layers; results mean nothing."""
        shape = replace(SHAPES[task.model.partition("@")[0]], layers=2 if self._tiny else MEASURED)
        base = self._base(shape, Mesh() if task.model.endswith("@1") else self._mesh)
        fused = FusedBase(base, compiled=False, gemms=GemmChoice())
        if not self._tiny and task.gemm_rows:
            choice = measure_gemms(fused.stacked, self._device, task.gemm_rows)
            path = gemm_paths(self._folder, task.model)[rows_of(task.model).index(task.gemm_rows[0])]
            save_gemms(path, choice, fused.stacked, task.gemm_rows)
        if not self._tiny and task.layers:
            fused = FusedBase(base, gemms=GemmChoice())
            fused.check()
        if not self._tiny and task.classes:
            paths = gemm_paths(self._folder, task.model)
            wait_for(paths)
            fused.gemms = load_gemms(paths, fused.stacked, self._device) or GemmChoice()
        self._models[task.model] = own = self._model(shape, base, fused)
        if task.train:
            compiled_runner(base)
        with ProcessPoolExecutor(threads, get_context("fork")) as pool, compile_only(pool):
            for rank in task.classes:
                self._warm_steps(task.model, rank)
            if task.train:
                with suppress(NonFiniteLoss, AssertionError):  # kernels that were not launched wrote nothing
                    train_steps(own.base, MicroBatchRunner(base, recompute=False), *self._rows(), repeats=1, warm_ups=0)
        self._synchronize()

    @torch.no_grad()
    def _warm_steps(self, model: str, rank: int) -> None:
        """One step of each size that is measured, with graphs; `rank`: of adapters of each kind, 0: without."""
        sharded: list[Strategy] = ["slora"] * min(3, self._mesh.size)
        kinds: list[Strategy | None] = ["nfs", *sharded] if rank else [None]
        alone, shape = model.endswith("@1"), model.partition("@")[0]
        batches = (1,) if alone else (1, 2, 4) if self._tiny else BATCHES
        prompts = (24,) if self._tiny else (16, 256, 1024)
        for place, kind in enumerate(kinds):
            if kind == "slora":  # Triton compiles numbers like 0 and 1 into kernels
                self._mesh.rank = place - 1
                self._models[model].graphs = None
            _, schedule, _ = self._prepare(model, Variant(shape, kind, rank), 1, 1, dry=True)
            for batch in batches:
                schedule.decode(batch, PAGE_TOKENS, 0)
            for prompt in prompts:
                schedule.generate(Load(1, prompt, 1), STEP_TOKENS)
            if not rank:
                schedule.generate(Load(1, 2 * prompts[-1], 1), 2 * STEP_TOKENS)
            self._finish(schedule)

    def drop(self, model: str) -> dict[str, float]:
        """Frees the base's memory."""
        self._adapters = None
        self._models.pop(model, None)
        gc.unfreeze()
        gc.collect()
        if not self._tiny:
            torch.cuda.empty_cache()
        return {}

    @torch.no_grad()
    def generate(self, model: str, variant: Variant, load: Load, repeats: int) -> dict[str, Any]:
        """Runs the load to its last token, after a run with few tokens."""
        own, schedule, about = self._prepare(model, variant, 1, load.batch)
        schedule.generate(load._replace(output=min(load.output, WARM_STEPS)), STEP_TOKENS)
        runs = []
        for _ in range(repeats):
            self._align(own)
            runs.append(schedule.generate(load, STEP_TOKENS))
        self._finish(schedule)
        steps = sorted(step for run in runs for step in run.step_ms)
        return about | {
            "e2e_s": [run.seconds for run in runs],
            "prefill_ms": [run.prefill_ms for run in runs],
            "decode_ms": _spread(steps),
        }

    @torch.no_grad()
    def decode(self, model: str, variant: Variant, load: Load, repeats: int, adapters: int) -> dict[str, Any]:
        """Steps at the load's mean context, whose keys and values are random numbers; the traffic of one step."""
        own, schedule, about = self._prepare(model, variant, adapters, load.batch)
        schedule.decode(load.batch, load.context, WARM_STEPS)
        self._align(own)
        steps = [
            step
            for _ in range(repeats)
            for step in schedule.decode(load.batch, load.context, DECODE_STEPS[own.shape.name] + WARM_STEPS)[
                WARM_STEPS:
            ]
        ]
        self._finish(schedule)
        return about | {"decode_ms": _spread(sorted(steps))}

    @torch.no_grad()
    def prefill(self, model: str, variant: Variant, load: Load, repeats: int) -> dict[str, Any]:
        """One prompt to its first token."""
        own, schedule, about = self._prepare(model, variant, 1, 1)
        step_tokens = 2 * STEP_TOKENS if load.prompt > STEP_TOKENS else STEP_TOKENS
        for _ in range(2):
            schedule.generate(load, step_tokens)
        found = []
        for _ in range(repeats):
            self._align(own)
            found.append(schedule.generate(load, step_tokens).prefill_ms)
        self._finish(schedule)
        return about | {"prefill_ms": _spread(sorted(found))}

    def train(self, model: str, repeats: int) -> dict[str, Any]:
        """Seconds of optimizer steps of 8x512 tokens, a LoRA of rank 16 on all sites."""
        own = self._models[model]
        rows = self._rows()
        runner = self._runner(own)
        self._align(own)
        seconds = train_steps(own.base, runner, *rows, repeats=repeats, warm_ups=1 if self._tiny else 4)
        if not self._tiny:
            torch.cuda.empty_cache()
        return {"step_s": _spread(sorted(seconds)), "tokens": rows[0] * rows[1], "rank": 16}

    def messages(self, _model: str) -> dict[str, Any]:
        """How long all-reduces take, by method and KiB."""
        return {"us": all_reduce_us(self._mesh)}

    def _runner(self, own: Model) -> MicroBatchRunner:
        own.runner = own.runner or compiled_runner(own.base)
        return own.runner

    def profile(self, model: str, variant: Variant, load: Load) -> dict[str, Any]:
        """Of decode steps; of the base's also of optimizer steps. On rank 0; the others run the same."""
        own, schedule, about = self._prepare(model, variant, 1, load.batch)
        with torch.no_grad():
            schedule.decode(load.batch, load.context, WARM_STEPS)
            found = self._profiled(own, lambda: schedule.decode(load.batch, load.context, PROFILED), PROFILED + 1)
        self._finish(schedule)
        if variant.strategy is None:
            rows, runner = self._rows(), self._runner(own)
            train_steps(own.base, runner, *rows, repeats=1, warm_ups=2)
            work = partial(train_steps, own.base, runner, *rows, repeats=PROFILED_TRAIN, warm_ups=0)
            found |= {"train": self._profiled(own, work, PROFILED_TRAIN)}
        return about | found

    def _profiled(self, own: Model, work: Callable[[], object], steps: int) -> dict[str, Any]:
        self._align(own)
        if self._tiny or self._mesh.rank:
            began = time.perf_counter()
            work()
            return {"step_ms": 1e3 * (time.perf_counter() - began) / steps}
        return profiled(work, steps)

    def _rows(self) -> tuple[int, int]:
        """Sequences and tokens of each, of an optimizer step."""
        return (2, 8) if self._tiny else (8, 512)

    @torch.no_grad()
    def _prepare(
        self, model: str, variant: Variant, adapters: int, batch: int, *, dry: bool = False
    ) -> tuple[Model, Schedule, dict[str, Any]]:
        """The adapters, the executor that serves them, and what a row says of both."""
        own, key = self._models[model], (model, variant, adapters)
        if variant.strategy is None:
            schedule = self._schedule(own, self._executor(own), [], dry=dry)
            if dry:
                return own, schedule, {}
            return own, schedule, {"graphs": True, "traffic": self._traffic(own, variant, batch, schedule, [])}
        if self._adapters is None or self._adapters[0] != key:
            self._adapters = None  # frees the memory of the last ones first
            made = [make_adapter(own.base, variant) for _ in range(adapters)]
            self._adapters = key, [weights for weights, _ in made], made[0][1]
        _, weights, sizes = self._adapters
        most = max(pair.rank for one in weights for pair in one.sites.values())
        executor = own.eager if graph_rank(most) is None else self._executor(own)
        about = {
            "rank": weights[0].settings.r,
            "local_rank": most,
            "adapter_parameters": sizes.whole,
            "adapter_parameters_held": sizes.held,
            "graphs": executor is not own.eager,
            "adapters": min(adapters, batch),
        }
        names = [(AdapterRef(f"{model}/{variant.name}/{i}", 1), one) for i, one in enumerate(weights)]
        schedule = self._schedule(own, executor, names, dry=dry)
        if dry:
            return own, schedule, {}
        return own, schedule, about | {"traffic": self._traffic(own, variant, batch, schedule, names)}

    def _executor(self, own: Model) -> StepExecutor:
        if self._tiny and os.environ.get("TRITON_INTERPRET") != "1":
            return own.eager  # its kernels need a GPU or the interpreter
        if own.graphs is None:
            most, step_tokens = (4, 64) if self._tiny else (max(BATCHES), 2 * STEP_TOKENS)
            own.graphs = GraphExecutor(own.fused, own.kv, own.eager, max_running=most, step_tokens=step_tokens)
        return own.graphs

    def _schedule(
        self, own: Model, executor: StepExecutor, adapters: Sequence[tuple[AdapterRef, LoraWeights]], *, dry: bool
    ) -> Schedule:
        """Of an executor whose graphs are captured, as the daemon captures them before it serves."""
        schedule = Schedule(executor, own.kv, own.shape.vocab, adapters, self._sequences, dry=dry)
        schedule.decode(1, PAGE_TOKENS, 0)  # from now on its graphs are known to be missing
        while executor.prepare():
            pass
        return schedule

    def _finish(self, schedule: Schedule) -> None:
        """Empties the adapters' slots: the next ones have other weights."""
        self._sequences = schedule.sequences
        schedule.close()

    def _traffic(
        self,
        own: Model,
        variant: Variant,
        batch: int,
        schedule: Schedule,
        adapters: Sequence[tuple[AdapterRef, LoraWeights]],
    ) -> dict[str, float]:
        """Collectives and bytes that a rank contributes in one decode step; counted when its graph is captured, in an
        executor of its own, as a replay counts none."""
        if own.base.sharding is None:
            return {}
        fully = variant.rank if variant.strategy == "slora" else 0
        traffic, key = own.base.sharding.mesh.traffic, (schedule.executor is own.eager, bool(adapters), batch, fully)
        if key not in own.traffic:
            graphs: GraphExecutor | None = None
            if schedule.executor is not own.eager:
                graphs = GraphExecutor(own.fused, own.kv, own.eager, max_running=batch, step_tokens=1)
                schedule = Schedule(graphs, own.kv, own.shape.vocab, adapters, 0)
                schedule.decode(batch, PAGE_TOKENS, 0)
            traffic.clear()
            own.forwards = 0
            while graphs is not None and not graphs.decode_graphs:  # the first is that of most sequences and rank
                assert graphs.prepare(()), "expected a graph"
            schedule.decode(batch, PAGE_TOKENS, 0)  # on a CPU nothing was captured
            steps = own.forwards or 1  # an eager step is none of the fused base's
            own.traffic[key] = {
                **{f"{name}.calls": count / steps for name, count in traffic.calls.items()},
                **{f"{name}.bytes": size / steps for name, size in traffic.bytes.items()},
            }
        return own.traffic[key]

    def _count_forwards(self, own: Model) -> None:
        forward: Callable[..., torch.Tensor] = own.fused.forward

        def counted(*args: object, **kwargs: object) -> torch.Tensor:
            own.forwards += 1
            return forward(*args, **kwargs)

        own.fused.forward = counted  # type: ignore[method-assign]

    def _fitting(self, shape: Shape, mesh: Mesh) -> Shape:
        """The shape with as many of its layers as fit into every rank's memory."""
        if self._tiny:
            return shape
        head, kv_heads = shape.hidden // shape.heads, max(1, shape.kv_heads // mesh.size)
        layer, ends = shape.parameters()
        page = page_layout([KvShape(kv_heads, head, head)], PAGE_TOKENS, torch.bfloat16).page_bytes
        a_layer = 2 * layer // mesh.size + page * (KV_TOKENS // PAGE_TOKENS + 1)
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] - RESERVE - 2 * ends * 2
        layers = torch.tensor([min(shape.layers, free // a_layer)], device=self._device)
        fitting = int(mesh.all_gather(layers, 0).min())
        assert fitting > 0, f"expected memory for a layer of {shape.name}"
        return replace(shape, layers=fitting)

    def _align(self, own: Model) -> None:
        """All ranks of the base begin together."""
        if own.base.sharding is not None:
            own.base.sharding.mesh.all_reduce(torch.zeros(1, device=self._device))
        self._synchronize()

    def _synchronize(self) -> None:
        if not self._tiny:
            torch.cuda.synchronize()


def _spread(values: list[float]) -> dict[str, float]:
    """Of sorted values."""
    tenth = len(values) // 10
    return {
        "median": statistics.median(values),
        "low": values[tenth],
        "high": values[-1 - tenth],
        "count": len(values),
    }
