"""An 8B shape with random weights on one GPU, its layers in FP8 and NF4 beside bf16: memory, decode, fine-tuning.

    python -m benchmarks.quant.quantized --out benchmarks/results [--only rows,decode,finetune,dx,products,nf4]
    TRITON_INTERPRET=1 python -m benchmarks.quant.quantized --tiny --out /tmp/tried

FP8 and bf16 hold the same weights and take turns. Decode runs through the engine with compiled layers and CUDA graphs;
fine-tuning is the daemon's trainer with one adapter of rank 16 on all linear modules. NF4 is loaded as by
`--quantization nf4`, and limited to 16 GiB: its value is what the whole process takes of the GPU in the end, with 32
adapters of rank 16 in the page pool, graphs, and a job of 4 rows of 512 tokens that recomputes each layer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial

import torch

from benchmarks.common.llama import llama_config
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, Target
from benchmarks.common.timing import event_us, synchronize
from benchmarks.ets.figure_5_1_trainer import Jobs, forget_compiled
from benchmarks.quant.few_rows import measure_few_rows
from benchmarks.serving.case import FULL, SEED, TINY, Bench, Load, Shape, make_base
from coserve.kernels.quantized import fp8
from coserve.kernels.quantized.weights import Fp8Weight
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.gemm_choice import GemmChoice, measure_gemms
from coserve.model.groups import share_inputs
from coserve.model.load import load_base
from coserve.model.quantized.modules import quantize_layers

GIB = 1 << 30
LIMIT = 16 * GIB
PAGE_TOKENS = 16
REPEATS = 3
PARTS = ("rows", "decode", "finetune", "dx", "products", "nf4")


class Benchmark:
    """The parts over one shape. The bf16 and FP8 bases are made once."""

    def __init__(self, shape: Shape, results: Results, *, tiny: bool) -> None:
        self._shape, self._results, self._tiny = shape, results, tiny
        self._device = torch.device(shape.device)
        self._backend = "grouped" if tiny else "segmented"
        self._made: dict[str, Base] = {}
        self._context = 0 if tiny else _taken()

    def run(self, part: str) -> None:
        runs: dict[str, Callable[[], None]] = {
            "nf4": self._nf4,
            "rows": partial(measure_few_rows, self._results, self._device, tiny=self._tiny),
            "products": self._products,
            "decode": self._decode,
            "finetune": self._finetune_forward,
            "dx": partial(self._finetune, "finetune_tok_s.dx", 1.2),
        }
        runs[part]()

    def _bases(self) -> dict[str, Base]:
        if not self._made:
            self._made["bf16"] = make_base(self._shape)
            model = make_base(self._shape).model
            quantize_layers(model, "fp8")
            gc.collect()
            self._made["fp8"] = wrap_base(model, name="llama-8b-random-fp8")
        return self._made

    def _compare(self, key: str, unit: str, found: dict[str, list[float]], target: float) -> None:
        """Put the speed in FP8, and its ratio to bf16's by pairs of neighbouring runs."""
        middle = {kind: round(statistics.median(values), 1) for kind, values in found.items()}
        self._results.put(f"quant.fp8.{key}", middle["fp8"], unit, None, found["fp8"], {"bf16": middle["bf16"]})
        ratios = [fp8 / bf16 for fp8, bf16 in zip(found["fp8"], found["bf16"], strict=True)]
        name = key.replace("_tok_s", "_speedup")
        ratio = round(statistics.median(ratios), 3)
        self._results.put(f"quant.fp8.{name}", ratio, "x", Target(target), ratios, middle)

    def _products(self) -> None:
        """Microseconds of a product of 4096 rows, forward and backward, for each kind of weight in a layer."""
        rows = 32 if self._tiny else 4096
        groups = {kind: FusedBase(base, compiled=False, gemms=GemmChoice()) for kind, base in self._bases().items()}
        kinds = {(one.in_features, one.sizes): at for at, one in enumerate(groups["bf16"].stacked)}
        for (inputs, sizes), at in kinds.items():
            about: dict[str, float] = {}
            for kind, fused in groups.items():
                weights = fused.stacked[at]
                x = torch.randn(rows, inputs, device=self._device, dtype=self._made[kind].dtype)
                dy = torch.randn(rows, sum(sizes), device=self._device, dtype=x.dtype)
                calls = {"forward": partial(weights.linear, x), "backward": partial(weights.backward, dy)}
                if isinstance(weights, Fp8Weight) and not self._tiny:
                    calls["dx"] = calls["backward"]
                    calls["backward"] = partial(replace(weights, rounds_gradients=False).backward, dy)
                    calls["transposed"] = partial(fp8.transposed, weights.weight)
                for name, call in calls.items():
                    about[f"{kind}.{name}"] = _microseconds([call], gpu=not self._tiny)
            ratio = round(about["bf16.forward"] / about["fp8.forward"], 3)
            self._results.put(f"quant.fp8.product.{inputs}x{sum(sizes)}", ratio, "x of bf16", None, (), about)

    def _decode(self) -> None:
        """Output tokens a second, without adapters."""
        benches = {}
        for kind, base in self._bases().items():
            began = time.perf_counter()
            gemms = GemmChoice()
            if not self._tiny:
                stacked = FusedBase(base, compiled=False, gemms=gemms).stacked
                gemms = measure_gemms(stacked, self._device, rows=(1, 64))
                print(kind, "gemv", dict(gemms.gemv), "skinny", dict(gemms.skinny), flush=True)
            fused = FusedBase(base, compiled=not self._tiny, gemms=gemms)
            kv = KvCache.for_base(base, self._shape.kv_tokens, PAGE_TOKENS)
            benches[kind] = Bench(base, self._shape, kv=kv, fused=fused)
            if not self._tiny:
                benches[kind].capture()
            print(f"{kind} compiled and captured in {time.perf_counter() - began:.1f} s", flush=True)
        asyncio.run(self._serve(benches))

    async def _serve(self, benches: dict[str, Bench]) -> None:
        async with AsyncExitStack() as stack:
            for bench in benches.values():
                await stack.enter_async_context(bench.serving())
            for sequences in (1, 4) if self._tiny else (1, 64):
                load = Load(sequences, 16, 4 if self._tiny else 256)
                found: dict[str, list[float]] = {kind: [] for kind in benches}
                for run in range(REPEATS + 1):
                    for kind, bench in benches.items():
                        asked = load.make_requests(f"{sequences}/{run}", self._shape.vocab)
                        seconds = await bench.serve(asked)
                        if run:
                            found[kind].append(sequences * load.output / seconds)
                self._compare(f"decode_tok_s.b{sequences}", "output tok/s", found, 1.3)

    def _finetune_forward(self) -> None:
        """`_finetune` with FP8 in the forward's products alone."""
        base = self._bases()["fp8"]
        share_inputs(base)
        for shared in base.sites.shared():
            if isinstance(shared.stacked, Fp8Weight):
                shared.stacked = replace(shared.stacked, rounds_gradients=False)
        try:
            self._finetune("finetune_tok_s", 1.1)
        finally:
            share_inputs(base)  # stacks anew, and so forgets the choice

    def _finetune(self, key: str, target: float) -> None:
        """Tokens a second of 8 rows of 512 tokens in one micro-batch."""
        rows, length = (2, 8) if self._tiny else (8, 512)
        found: dict[str, list[float]] = {kind: [] for kind in self._bases()}
        with ExitStack() as stack:
            jobs = {
                kind: stack.enter_context(self._jobs(base, length, rows, {})) for kind, base in self._bases().items()
            }
            for run in range(3 + 2 * REPEATS):
                for kind, own in jobs.items():
                    speed = self._speed(own, run)
                    if run > 2:
                        found[kind].append(speed)
        self._compare(key, "tok/s", found, target)

    def _jobs(self, base: Base, length: int, rows: int, settings: dict[str, object], recomputed: int = 0) -> Jobs:
        return Jobs(
            base,
            self._backend,
            length=length,
            batch=rows,
            ranks=[16],
            rows=rows,
            targets=base.spec.default_targets,
            recomputed=recomputed,
            settings=settings,
        )

    def _speed(self, jobs: Jobs, run: int) -> float:
        synchronize(self._shape.device)
        began = time.perf_counter()
        tokens = jobs.train(run)
        synchronize(self._shape.device)
        return tokens / (time.perf_counter() - began)

    def _nf4(self) -> None:
        shape = self._shape if self._tiny else replace(self._shape, max_running=32, step_tokens=512)
        if not self._tiny:
            self._made.clear()
            self.clear()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.get_device_properties(0).total_memory)
        try:
            about = self._nf4_parts(shape)
        finally:
            if not self._tiny:
                torch.cuda.set_per_process_memory_fraction(1.0)
        self._results.put("quant.nf4.gib.8b", about["gib.job"], "GiB", Target(16, most=True), (), about)

    def _nf4_parts(self, shape: Shape) -> dict[str, float]:
        """GiB of the GPU that the process takes after each stage."""
        about: dict[str, float] = {}
        before = 0 if self._tiny else _taken() - self._context  # by earlier parts

        def note(stage: str) -> None:
            synchronize(shape.device)
            about[f"gib.{stage}"] = round((weights if self._tiny else _taken() - before) / GIB, 3)
            print("nf4", stage, about, flush=True)

        with tempfile.TemporaryDirectory() as folder:
            llama_config(shape).save_pretrained(folder)
            base = load_base(folder, device=shape.device, dtype="auto", load_format="dummy", quantization="nf4")
        weights = sum(one.nbytes for one in (*base.model.parameters(), *base.model.buffers()))
        about["gib.weights"] = round(weights / GIB, 3)
        if not self._tiny:
            about["gib.peak_of_loading"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
            gc.collect()
            torch.cuda.empty_cache()
        note("loaded")
        tokens = shape.kv_tokens if self._tiny else 30_720  # 2.7 GB of adapters, and 10 000 tokens
        fused = FusedBase(base, compiled=False, gemms=GemmChoice())
        bench = Bench(base, shape, kv=KvCache.for_base(base, tokens, PAGE_TOKENS), fused=fused)
        bench.publish("a")
        if not self._tiny:
            print(f"nf4 captured in {bench.capture():.1f} s", flush=True)
        load = Load(4, 16, 2, adapters=4) if self._tiny else Load(32, 16, 32, adapters=32)
        with self._jobs(*self._nf4_job(base)) as jobs:
            asyncio.run(self._nf4_work(bench, load, jobs, about, note))
        return about

    def _nf4_job(self, base: Base) -> tuple[Base, int, int, dict[str, object], int]:
        rows, length = (2, 8) if self._tiny else (4, 512)
        return base, length, rows, {"compile": "off", "recompute": True}, base.spec.layers

    async def _nf4_work(
        self, bench: Bench, load: Load, jobs: Jobs, about: dict[str, float], note: Callable[[str], None]
    ) -> None:
        async with bench.serving():
            for run in range(2):
                seconds = await bench.serve(load.make_requests(f"nf4/{run}", self._shape.vocab))
            about["tok_s.32_adapters"] = round(load.requests * load.output / seconds, 1)
            note("served")
            speeds = [self._speed(jobs, run) for run in range(3)]
            about["tok_s.job"] = round(speeds[-1], 1)
            await bench.serve(load.make_requests("nf4/after", self._shape.vocab))
            note("job")

    def clear(self) -> None:
        """Free what a part leaves."""
        forget_compiled()
        gc.collect()
        if not self._tiny:
            torch.cuda.empty_cache()


def _taken() -> int:
    """Bytes of the GPU that are taken, the CUDA context included."""
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    return total - free


def _microseconds(calls: Sequence[Callable[[], object]], *, gpu: bool) -> float:
    if gpu:
        return round(event_us(calls).us, 1)
    began = time.perf_counter()
    for call in calls:
        call()
    return round(1e6 * (time.perf_counter() - began), 1)


def main() -> None:
    parser = make_parser(__doc__, tiny="a tiny shape on the CPU, to try the script")
    add_names(parser, "--only", PARTS)
    options = parser.parse_args()
    shape = (
        replace(TINY, max_running=4, step_tokens=32)
        if options.tiny
        else replace(FULL, max_running=64, step_tokens=256, kv_tokens=32_768)
    )
    results = Results.of(options, "quant.json", __file__, vars(shape), seed=SEED)
    benchmark, errors = Benchmark(shape, results, tiny=options.tiny), dict[str, str]()
    for part in (part for part in PARTS if part in options.only):
        began = time.perf_counter()
        try:
            benchmark.run(part)
        except Exception:  # noqa: BLE001 - the other parts are still to be measured
            errors[part] = traceback.format_exc()
            print(f"{part} failed:\n{errors[part]}", flush=True)
        benchmark.clear()
        print(f"{part}: {time.perf_counter() - began:.1f} s", flush=True)
    if errors:
        (options.out / "quant_errors.json").write_text(json.dumps(errors, indent=1) + "\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
