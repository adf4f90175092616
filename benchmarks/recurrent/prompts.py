"""Prompts of Qwen3.5-9B's shape, their recurrence token by token and in chunks, and training's: `--only prompts`,
`--only training` and `--only prefill`.

`prompt_us.SxT.tokens`, `.chunks`       a layer's recurrence of S sequences of T tokens, in microseconds of its kernels:
                                        by the fused kernel, and in chunks by serving's launch shape. Beside it, the
                                        kernels of each shape and the distance of its outputs from the fused kernel's
                                        (`error`). `floor`: inputs, outputs and states moved once at `--bandwidth`
`train_us.SxT.forward`, `.backward`     a layer's recurrence in training, in microseconds of its kernels, with the times
                                        and the error of each of `TRAINED` beside it. `again`: the backward if the
                                        forward kept nothing
`prefill_tok_s.tokens.T`, `.chunks.T`   prompt tokens a second of one prompt of T tokens, through the engine
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
import triton
from torch import Tensor

from benchmarks.common.results import Results
from benchmarks.common.timing import microseconds
from benchmarks.common.traces import by_kernel, traced
from benchmarks.recurrent.kernels import GROUPS, HEADS, SIZE, cut_inputs
from benchmarks.serving.case import Bench, Load, Shape
from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.recurrent.chunked.long_runs import PROMPTS, LongRuns
from coserve.kernels.recurrent.chunked.recurrence import ChunkedRecurrence, ChunkShape
from coserve.kernels.recurrent.fused.steps import FusedRecurrence
from coserve.kernels.recurrent.interface import RecurrenceInputs
from coserve.kernels.recurrent.reference import CHUNK, normalized
from coserve.kernels.recurrent.slots import LayerStates
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.fused import FusedBase

CHUNKED_FROM = 64
WAYS = {"tokens": None, "chunks": CHUNKED_FROM}
"""The fewest tokens of a run that is computed in chunks."""
STEPS = ((2048, 1), (2048, 8), (512, 1), (64, 1))
"""Tokens of a step, and its sequences."""
SHAPES = (
    ChunkShape(),
    replace(PROMPTS, part=CHUNK),
    replace(PROMPTS, part=16, compact=True, outputs=64),
    replace(PROMPTS, part=4),
    replace(PROMPTS, compact=True),
    replace(PROMPTS, exact=True),
    replace(PROMPTS, solve_warps=8),
    replace(PROMPTS, stages=3),
    replace(PROMPTS, warps=8),
    replace(PROMPTS, values=16),
    replace(PROMPTS, values=64),
    replace(PROMPTS, values=64, warps=8),
)
TRAINING = ChunkShape()
TRAINED = (
    replace(TRAINING, part=CHUNK, compact=False),
    replace(TRAINING, compact=False),
    replace(TRAINING, part=8),
    replace(TRAINING, exact=False),
    replace(TRAINING, part=8, exact=False),
    replace(TRAINING, part=4, exact=False),
    replace(TRAINING, solve_warps=8),
    replace(TRAINING, stages=1),
    replace(TRAINING, stages=3),
    replace(TRAINING, values=32),
    replace(TRAINING, outputs=128),
    replace(TRAINING, back_warps=8),
    replace(TRAINING, back_stages=3),
    replace(TRAINING, back_values=64),
    replace(TRAINING, back_values=64, back_warps=8),
    replace(TRAINING, back_values=64, back_warps=8, back_stages=1),
)
"""Launch shapes of training beside its own."""
BATCHES = ((4096, 8), (4096, 1))
"""Tokens of a micro-batch, and its rows: with one, programs that go along a row do not fill the GPU."""
CALLS, REPEATS, WARM = 5, 5, 6


def measure_recurrence(results: Results, device: torch.device, bandwidth: float, *, tiny: bool) -> None:
    """Put a row for each step and way; for the first step, with the times of other launch shapes."""
    for tokens, sequences in ((40, 2),) if tiny else STEPS:
        length, name = tokens // sequences, f"models.qwen35.prompt_us.{sequences}x{tokens // sequences}"
        given, states, runs = _drawn(tokens, sequences, device, tiny=tiny)
        heads, groups, size = given.v.shape[1], given.k.shape[1], given.v.shape[2]
        moved = 4 * (groups + heads) * size * tokens + 6 * heads * tokens + 8 * sequences * heads * size * size
        floor: dict[str, object] = {"floor": round(1e6 * moved / bandwidth, 2)}
        FusedRecurrence.chunked_from = WAYS["tokens"]
        fused = FusedRecurrence({0: states}, tokens=tokens, sequences=sequences, device=device)
        fused.load(runs)
        right, out = fused.recur(0, given).float(), torch.zeros_like(given.v)
        singly = _kernel_us(partial(fused.recur, 0, given), device)
        results.put(f"{name}.tokens", round(sum(singly.values()), 1), "us", about=floor)
        slots, times = [run.slot for run in runs], dict[str, dict[str, float]]()
        for shape in (PROMPTS, *(SHAPES if (tokens, sequences) == STEPS[0] else ())):
            chunked = LongRuns(tokens, sequences, min(length, CHUNKED_FROM), device, shape)
            chunked.load([(start, start + length) for start in range(0, tokens, length)], slots, slots)
            states.recurrent.zero_()
            try:
                chunked.recur(given, out, states.recurrent)
            except triton.runtime.errors.OutOfResources:
                continue
            error = float(torch.linalg.vector_norm(out.float() - right) / torch.linalg.vector_norm(right))
            found = _kernel_us(partial(chunked.recur, given, out, states.recurrent), device)
            times[_name(shape)] = _rounded(found) | {"error": round(error, 5)}
            print(name, _name(shape), f"{sum(found.values()):.1f} us", times[_name(shape)], flush=True)
        value = sum(us for one, us in times[_name(PROMPTS)].items() if one != "error")
        results.put(f"{name}.chunks", round(value, 1), "us", about=floor | times)


def measure_training(results: Results, device: torch.device, bandwidth: float, *, tiny: bool) -> None:
    """Put a row for each batch's forward and one for its backward, each with the times of all launch shapes."""
    for tokens, rows in ((40, 2),) if tiny else BATCHES:
        _measure_batch(results, tokens, rows, device, bandwidth, tiny=tiny)


def _measure_batch(
    results: Results, tokens: int, rows: int, device: torch.device, bandwidth: float, *, tiny: bool
) -> None:
    drawn, _, _ = _drawn(tokens, rows, device, tiny=tiny)
    given, dout_THV = normalized(drawn), torch.randn(drawn.v.shape, device=device, dtype=drawn.v.dtype)
    bounds, right = range(0, tokens + 1, tokens // rows), list[Tensor]()
    moved = sum(one.nbytes for one in given if isinstance(one, Tensor))  # inputs, and as much again for their gradients
    moved_back = 2 * moved + dout_THV.nbytes
    times: dict[str, dict[str, dict[str, float]]] = {"forward": {}, "backward": {}}
    for shape in (*TRAINED, TRAINING):
        kernels, name = ChunkedRecurrence.of_bounds(bounds, device, shape=shape), _name(shape, TRAINING)
        try:
            out_THV, kept = kernels.recur_keeping(given)
            found = [out_THV, *kernels.gradients(given, dout_THV, kept)]
        except triton.runtime.errors.OutOfResources:
            continue
        right = right or found
        error = max(
            float((own - one).float().norm() / one.float().norm()) for own, one in zip(found, right, strict=True)
        )
        forward, backward = partial(kernels.recur, given), partial(kernels.gradients, given, dout_THV, kept)
        for what, run in (("forward", forward), ("backward", backward)):
            times[what][name] = _rounded(_kernel_us(run, device)) | {"error": round(error, 5)}
            print(f"training {rows}x{tokens // rows}", what, name, times[what][name], flush=True)
    again = _rounded(_kernel_us(partial(kernels.gradients, given, dout_THV), device))
    for what, size in (("forward", moved + dout_THV.nbytes), ("backward", moved_back)):
        own, floor = times[what][_name(TRAINING, TRAINING)], round(1e6 * size / bandwidth, 2)
        value = sum(us for one, us in own.items() if one != "error")
        about: dict[str, object] = {"floor": floor, **times[what], **({"again": again} if what == "backward" else {})}
        results.put(f"models.qwen35.train_us.{rows}x{tokens // rows}.{what}", round(value, 1), "us", about=about)


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {one: round(us, 1) for one, us in found.items()}


def _name(shape: ChunkShape, like: ChunkShape = PROMPTS) -> str:
    """Return what differs from the shape of serving, or of training."""
    own = asdict(like)
    found = " ".join(f"{name}={value}" for name, value in asdict(shape).items() if value != own[name])
    return found or ("serving" if like == PROMPTS else "training")


def _drawn(
    tokens: int, sequences: int, device: torch.device, *, tiny: bool
) -> tuple[RecurrenceInputs, LayerStates, list[TokenRun]]:
    """Return a layer's inputs, cut from a convolution's output, its states, and the runs of a step."""
    heads, groups, size = (4, 2, 8) if tiny else (HEADS, GROUPS, SIZE)
    dtype = torch.float32 if tiny else torch.bfloat16
    made = torch.randn(tokens, (2 * groups + heads) * size, device=device, dtype=dtype)
    decay = -torch.rand(tokens, heads, device=device) / 8
    beta = torch.randn(tokens, heads, device=device, dtype=dtype).sigmoid()
    given = cut_inputs(made, decay, beta, groups, size)
    conv = torch.zeros(sequences + 2, 3, made.shape[1], device=device, dtype=dtype)
    states = LayerStates(conv, torch.zeros(sequences + 2, heads, size, size, device=device))
    return given, states, [TokenRun(tokens // sequences, 1, (), slot) for slot in range(sequences)]


def _kernel_us(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Microseconds a call of each kernel; without a GPU of the call."""
    if device.type != "cuda":
        return {"all": microseconds(run, device)}
    run()
    kernels = traced(lambda: [run() for _ in range(CALLS)], device, host=False)
    return {name[:40]: us for us, _, name in by_kernel(kernels, CALLS)}


def measure_prefill(base: Base, shape: Shape, results: Results, *, tiny: bool) -> None:
    """Prompts one at a time, each way; both have their layers compiled, and CUDA graphs of the steps."""
    fused = FusedBase(base, compiled=False) if tiny else FusedBase(base)
    for way, least in WAYS.items():
        FusedRecurrence.chunked_from = least
        kv = KvCache.for_base(base, shape.kv_tokens, 16, sequences=shape.max_running)
        asyncio.run(_prefill(Bench(base, shape, kv=kv, fused=fused), way, results, tiny=tiny))
    FusedRecurrence.chunked_from = CHUNKED_FROM


async def _prefill(bench: Bench, way: str, results: Results, *, tiny: bool) -> None:
    async with bench.serving():
        for length in (32, 96) if tiny else (2048, 4096):
            warm = 1 if tiny else WARM  # the graph of a step is captured when some have missed it
            prompts = await bench.speeds(Load(1, length, 1), f"{way} {length}", REPEATS, warm)
            found = [length * each for each in prompts]
            key = f"models.qwen35.prefill_tok_s.{way}.{length}"
            results.put(key, round(statistics.median(found), 1), "prompt tok/s", None, found)
