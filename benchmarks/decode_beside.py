"""What a decode step costs training that runs beside it, and whether fewer multiprocessors for training make it cheaper.

    python -m benchmarks.decode_beside --out benchmarks/results

The products of Llama-3.1-8B in bfloat16 with random weights, without LoRA. Training is the forward and backward of four layers over 8 rows of 512 tokens in
one CUDA graph, again and again on a stream of low priority; a decode step of 96 sequences, each with 512 tokens in the cache, is one graph on a stream of high
priority, begun every 45 and every 20 ms. Attention in decode steps reads its bytes and computes next to nothing.

Training has all multiprocessors (`all`), at most N in its GEMMs (`gemm N`, cuBLAS' target), or N in a green context (`green N`); steps may use all.
`step_ms`: median of a step, 10th and 90th percentile; `train`: graphs a second; `lost_ms`: of training, a step, against the same training without steps;
`lost_of_all_ms`: against training on all multiprocessors, if it has fewer only while a step runs.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.options import make_parser
from benchmarks.provenance import command, gpu_run
from coserve.kernels.gpu.partition import split_multiprocessors

D, QKV, INNER, VOCAB, LAYERS = 4096, 6144, 14336, 128256, 32
"""Hidden, fused queries, keys and values, the MLP's inner size."""
SEQUENCES, CACHED, ROWS, TOKENS, TRAINED = 96, 512, 8, 512, 4
"""Of a decode step; rows, tokens of a row and layers of a training graph."""
PERIODS = (0.045, 0.020)
GEMM_LIMITS = (116, 96, 80, 66)
SHARES = (0.76, 0.64)
"""Of the multiprocessors, in a green context."""
SECONDS, AHEAD = 2.0, 3
"""Of each run; training graphs in flight."""
Weights = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of a layer: queries, keys and values (D, QKV); output (D, D); gate and up (D, 2 * INNER); down (INNER, D)."""


def norm(h_TD: Tensor) -> Tensor:
    return functional.rms_norm(h_TD, (h_TD.shape[-1],))


def gated(both_TF: Tensor) -> Tensor:
    return functional.silu(both_TF[:, :INNER]) * both_TF[:, INNER:]


def decode(h_BD: Tensor, cache_BN: Tensor, layers: list[Weights], head_DV: Tensor) -> Tensor:
    for qkv, output, gate_up, down in layers:
        read_B1 = cache_BN.sum(1, dtype=torch.float32)[:, None].to(h_BD.dtype)
        h_BD = h_BD + ((norm(h_BD) @ qkv)[:, :D] + 0 * read_B1) @ output
        h_BD = h_BD + gated(norm(h_BD) @ gate_up) @ down
    return (norm(h_BD) @ head_DV).argmax(-1)


def train(h_TD: Tensor, layers: list[Weights]) -> Tensor:
    """Gradients of inputs, as LoRA needs them, none of weights. Values do not matter."""
    for qkv, output, gate_up, down in layers:
        heads = (norm(h_TD) @ qkv).view(ROWS, TOKENS, 48, 128).transpose(1, 2)
        keys, values = (one.repeat_interleave(4, 1) for one in (heads[:, 32:40], heads[:, 40:]))
        mixed = functional.scaled_dot_product_attention(heads[:, :32], keys, values, is_causal=True)
        h_TD = h_TD + mixed.transpose(1, 2).reshape(-1, D) @ output
        both_TF = norm(h_TD) @ gate_up
        h_TD = h_TD + gated(both_TF) @ down
        inner_TF = h_TD @ down.t()
        both_TF = torch.cat([inner_TF * both_TF[:, INNER:], inner_TF * both_TF[:, :INNER]], 1)
        attended_TD = norm(h_TD + both_TF @ gate_up.t()) @ output.t()
        h_TD = norm(h_TD + torch.cat([attended_TD, attended_TD[:, : QKV - D]], 1) @ qkv.t())
    return h_TD


def graph_of(run: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    torch.cuda.synchronize()
    return graph


@contextmanager
def gemms_on(multiprocessors: int) -> Iterator[None]:
    """What cuBLAS chooses inside is for so many; 0: for all."""
    library = ctypes.CDLL(f"libcublas.so.{(torch.version.cuda or '13').split('.')[0]}")
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    library.cublasSetSmCountTarget(handle, ctypes.c_int(multiprocessors))
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, ctypes.c_int(0))


@dataclass(frozen=True)
class Run:
    """Training graphs a second, decode steps a second, and milliseconds of a step: 10th, 50th and 90th percentile."""

    train: float
    steps: float
    step_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)


class Bench:
    def __init__(self) -> None:
        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

        self._layers: list[Weights] = [
            (weights(D, QKV), weights(D, D), weights(D, 2 * INNER), weights(INNER, D)) for _ in range(LAYERS)
        ]
        head_DV, cache_BN = weights(D, VOCAB), weights(SEQUENCES, CACHED * 2 * 1024)
        self._h_TD, h_BD = weights(ROWS * TOKENS, D), weights(SEQUENCES, D)
        self.low, self._high = (torch.cuda.Stream(priority=each) for each in (-1, -5))  # type: ignore[no-untyped-call]
        self._step = graph_of(lambda: decode(h_BD, cache_BN, self._layers, head_DV), self._high)

    def training(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        return graph_of(lambda: train(self._h_TD, self._layers[:TRAINED]), stream)

    def run(self, graph: torch.cuda.CUDAGraph | None, stream: torch.cuda.Stream, period: float | None) -> Run:
        """`graph` in turn on `stream`, None: nothing; a step each `period` seconds, None: none."""
        flight, spans, done = list[torch.cuda.Event](), list[tuple[torch.cuda.Event, torch.cuda.Event]](), 0
        torch.cuda.synchronize()
        begin = time.perf_counter()
        due = begin + (period or 0.0)
        while (now := time.perf_counter()) < begin + SECONDS:
            while flight and flight[0].query():  # type: ignore[no-untyped-call]
                del flight[0]
                done += 1
            while graph is not None and len(flight) < AHEAD:
                with torch.cuda.stream(stream):
                    graph.replay()
                    flight.append(recorded(timed=False))
            if period is not None and now >= due:
                with torch.cuda.stream(self._high):
                    start = recorded(timed=True)
                    self._step.replay()
                    spans.append((start, recorded(timed=True)))
                due += period
            time.sleep(2e-4)
        seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        if not spans:
            return Run(done / seconds, 0.0)
        tenths = quantiles([start.elapsed_time(end) for start, end in spans], n=10)
        return Run(done / seconds, len(spans) / seconds, (tenths[0], tenths[4], tenths[8]))


def recorded(*, timed: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
    event.record()
    return event


def rows_of(name: str, bench: Bench, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> list[dict[str, Any]]:
    alone, found = bench.run(graph, stream, None), []
    for period in PERIODS:
        beside = bench.run(graph, stream, period)
        lost_ms = (1 - beside.train / alone.train) / beside.steps * 1e3
        row = {"training": name, "period_ms": period * 1e3, "train_alone": alone.train, "train": beside.train}
        found.append(row | {"step_ms": beside.step_ms, "lost_ms": lost_ms})
        print(json.dumps(found[-1]), flush=True)
    return found


def measured() -> dict[str, Any]:
    bench = Bench()
    step = bench.run(None, bench.low, PERIODS[0])
    rows = rows_of("all", bench, bench.training(bench.low), bench.low)
    for limit in GEMM_LIMITS:
        with gemms_on(limit):
            graph = bench.training(bench.low)
        rows += rows_of(f"gemm {limit}", bench, graph, bench.low)
    for share in SHARES:
        part = split_multiprocessors(torch.device("cuda", torch.cuda.current_device()), share).training
        rows += rows_of(f"green {part.multiprocessors}", bench, bench.training(part.stream), part.stream)
    full = rows[0]["train_alone"]
    for row in rows:
        ms = row["step_ms"][1]
        row["lost_of_all_ms"] = ms - (ms - row["lost_ms"]) * row["train_alone"] / full
    return {"step_alone_ms": step.step_ms, "rows": [rounded(row) for row in rows]}


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [round(each, 2) for each in value] if isinstance(value, tuple) else round(value, 2) if isinstance(value, float) else value
        for name, value in row.items()
    }  # fmt: skip


def main() -> None:
    options = make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    about = gpu_run("benchmarks.decode_beside", "", options.commit, {}) | {
        "command": command("benchmarks.decode_beside")
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decode_beside.json").write_text(json.dumps({**about, **measured()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
