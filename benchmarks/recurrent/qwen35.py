"""Qwen3.5-9B's shape with random weights on one GPU: decode, a prompt, and fine-tuning.

    python -m benchmarks.recurrent.qwen35 --out benchmarks/results [--only kernels,prompts,decode,prefill,...]
    TRITON_INTERPRET=1 python -m benchmarks.recurrent.qwen35 --tiny --out /tmp/tried

Decode runs through the engine, with compiled layers and CUDA graphs. Its floor is the time to read the weights once
and to read and write each sequence's states once, at `--bandwidth`. Fine-tuning is the daemon's trainer with one
adapter of rank 16 on all linear modules of the layers, compiled as the daemon does by default. `peft` is the same
adapter in PEFT and transformers, whose recurrence is flash-linear-attention's where it is installed: its layers as they
are, and compiled; its number is the faster's. `vllm` is the same decode in vLLM (`--vllm-site`). `profile` lists the
kernels of a decode step of 64 sequences; `kernels` times some of them by each of their launch shapes
(`benchmarks.recurrent.kernels`). `prefill` computes prompts token by token and in chunks, and `prompts` times the
kernels of both, and `training` those of fine-tuning (`benchmarks.recurrent.prompts`). `snapshots` times copies of a
sequence's states (`benchmarks.recurrent.snapshots`).
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import Qwen3_5TextConfig, modeling_qwen3_5

from benchmarks.common.llama import random_model
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, Target
from benchmarks.common.timing import steps_tok_s
from benchmarks.ets.figure_5_1_trainer import Jobs
from benchmarks.finetuning.profile import profiled
from benchmarks.finetuning.with_peft import chunked_loss, optimizer_step
from benchmarks.peers.trainer import adapted
from benchmarks.recurrent.kernels import measure_kernels
from benchmarks.recurrent.prompts import measure_prefill, measure_recurrence, measure_training
from benchmarks.recurrent.snapshots import measure_snapshots
from benchmarks.recurrent.with_vllm import loads as vllm_loads
from benchmarks.recurrent.with_vllm import with_vllm
from benchmarks.serving.case import SEED, Bench, Load, Shape
from benchmarks.serving.idle import measure
from coserve.memory.kv import KvCache
from coserve.memory.state_pool import state_bytes
from coserve.model.base import Base, wrap_base

FULL = Shape(32, 4096, 12288, 16, 4, 248320, 8192, "cuda", 64, 2048, 131_072)
TINY = Shape(4, 32, 48, 4, 2, 512, 256, "cpu", 4, 32, 4096)
HEADS = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
"""Sizes of the tiny shape's delta nets."""
PARTS = ("kernels", "snapshots", "prompts", "training", "decode", "prefill", "profile", "finetune", "peft", "vllm")
PAGE_TOKENS = 16
DECODED = (1, 64)
"""Sequences that decode at once."""
PROMPT, OUTPUT = 16, 256
REPEATS = 3
RANK = 16
TARGETS = (
    "down_proj",
    "gate_proj",
    "in_proj_a",
    "in_proj_b",
    "in_proj_qkv",
    "in_proj_z",
    "k_proj",
    "o_proj",
    "out_proj",
    "q_proj",
    "up_proj",
    "v_proj",
)
"""All linear modules of the layers."""


def config_of(shape: Shape) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        **({} if shape.device == "cuda" else HEADS | {"head_dim": 8}),
    )


def make_model(shape: Shape) -> PreTrainedModel:
    return random_model(config_of(shape), shape.device, SEED)


def floor_seconds(base: Base, sequences: int, bandwidth: float) -> float:
    """Least seconds of a decode step: all weights but the embedding read once, all states read and written once."""
    embedding = base.model.get_input_embeddings().weight
    weights = sum(one.nbytes for one in base.model.parameters()) - embedding.nbytes
    moved: int = weights + 2 * sequences * state_bytes(base.states, base.dtype)
    return moved / bandwidth


async def serve(bench: Bench, results: Results, wanted: set[str], bandwidth: float, *, tiny: bool) -> None:
    """Output tokens a second of decodes, and the kernels of a step."""
    async with bench.serving():
        for sequences in (1, 4) if tiny else DECODED:
            if "decode" not in wanted:
                continue
            load = Load(sequences, PROMPT, 4 if tiny else OUTPUT)
            found = await bench.speeds(load, str(sequences), REPEATS)
            value, least = statistics.median(found), floor_seconds(bench.base, sequences, bandwidth)
            about = {"floor_tok_s": round(sequences / least, 1), "of_floor": round(value * least / sequences, 3)}
            peer = results.row(f"models.qwen35.vllm_tok_s.b{sequences}")
            goal = round(0.8 * sequences / least, 1) if peer is None else peer["value"]
            target = Target(goal) if sequences == 64 else None
            key = f"models.qwen35.decode_tok_s.b{sequences}"
            results.put(key, round(value, 1), "output tok/s", target, found, about)
        if "profile" in wanted:
            load = Load(4 if tiny else 64, PROMPT, 12 if tiny else OUTPUT)
            idle = await measure(bench, load)
            shown = idle.about() | {"idle": idle.idle, "kernels": [" ".join(map(str, one)) for one in idle.kernels]}
            results.put(f"models.qwen35.decode_step_ms.b{load.requests}", idle.step_ms_unprofiled, "ms", about=shown)


def finetune(base: Base, shape: Shape, results: Results, *, tiny: bool) -> None:
    """Tokens a second of 8 rows of 512 tokens in one micro-batch, beside PEFT's if the file has them."""
    rows, length = batch_of(tiny=tiny)
    backend, began = "grouped" if tiny else "segmented", time.perf_counter()
    with Jobs(base, backend, length=length, batch=rows, ranks=[RANK], rows=rows, targets=TARGETS) as jobs:
        ready = time.perf_counter() - began
        found = steps_tok_s(jobs.train, shape.device, REPEATS)
        profile = profiled(base, jobs, 1e3 * rows * length / statistics.median(found))
    about = {"layers": jobs.layers, "ready_s": round(ready, 1), "profile": profile}
    peft = results.row(f"models.qwen35.peft_tok_s.{rows}x{length}")
    target = None if peft is None else Target(round(1.2 * peft["value"], 1))
    key = f"models.qwen35.finetune_tok_s.{rows}x{length}"
    results.put(key, round(statistics.median(found), 1), "tok/s", target, found, about)


def with_peft(targets: Sequence[str], shape: Shape, results: Results, *, tiny: bool) -> None:
    """The same in PEFT, with as many tokens: forward, backward, clipping, AdamW; layers as they are, and compiled."""
    rows, length = batch_of(tiny=tiny)
    try:
        recurrence = f"flash-linear-attention: fla-core {version('fla-core')}"
    except PackageNotFoundError:
        recurrence = "transformers' own, in torch"
    speeds = dict[str, list[float]]()
    failures = dict[str, str]()
    for arm in ("eager", "compiled"):
        try:
            speeds[arm] = peft_speeds(targets, shape, rows, length, compiled=arm == "compiled")
        except Exception as error:  # noqa: BLE001 - what torch, PEFT or the recurrence's package cannot compile is told
            failures[arm] = f"{type(error).__name__}: {error}"[:500]
            print(f"PEFT, {arm}: {failures[arm]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if speeds:
            values = {arm: round(statistics.median(found), 1) for arm, found in speeds.items()}
            faster = max(values, key=values.__getitem__)
            about = {"recurrence": recurrence, "layers": faster, "speeds": values, "failures": failures}
            key = f"models.qwen35.peft_tok_s.{rows}x{length}"
            results.put(key, values[faster], "tok/s", None, speeds[faster], about)


def peft_speeds(targets: Sequence[str], shape: Shape, rows: int, length: int, *, compiled: bool) -> list[float]:
    """Tokens a second of steps, after warm ones. `compiled`: all but the recurrence, which torch 2.11 cannot trace:
    it takes the result for one of a chunk's tokens."""
    if compiled:
        untraced: Callable[..., Any] = torch.compiler.disable  # untyped
        modeling_qwen3_5.torch_chunk_gated_delta_rule = untraced(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    model = adapted(make_model(shape), RANK, targets, compiled=compiled).train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-4, weight_decay=0.0, fused=shape.device == "cuda")
    ids_BL = torch.randint(shape.vocab, (rows, length), device=shape.device)

    def train(run: int) -> int:
        optimizer_step(chunked_loss(model, ids_BL), optimizer)
        return ids_BL.numel()

    return steps_tok_s(train, shape.device, REPEATS)


def batch_of(*, tiny: bool) -> tuple[int, int]:
    """Rows of a micro-batch, and their length."""
    return (2, 8) if tiny else (8, 512)


def main() -> None:
    parser = make_parser(__doc__, tiny="a tiny shape on the CPU, to try the script")
    add_names(parser, "--only", PARTS, default=("decode", "prefill", "profile", "finetune"))
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second of the GPU's memory")
    parser.add_argument("--vllm-site", type=Path, default=None, help="folder with vLLM and what it needs")
    options = parser.parse_args()
    wanted, shape = set(options.only), TINY if options.tiny else FULL
    results = Results.of(options, "recurrent.json", __file__, vars(shape) | {"bandwidth": options.bandwidth}, seed=SEED)
    if "kernels" in wanted:
        measure_kernels(results, torch.device(shape.device), options.bandwidth, tiny=options.tiny)
    if "snapshots" in wanted:
        measure_snapshots(results, torch.device(shape.device), tiny=options.tiny)
    if "prompts" in wanted:
        measure_recurrence(results, torch.device(shape.device), options.bandwidth, tiny=options.tiny)
    if "training" in wanted:
        measure_training(results, torch.device(shape.device), options.bandwidth, tiny=options.tiny)
    if "vllm" in wanted:
        given = vllm_loads(DECODED, PROMPT, OUTPUT, REPEATS)
        with_vllm(config_of(shape), given, 2048, options.vllm_site, results)
    if "peft" in wanted:  # first: a base puts coserve's recurrences in the place of transformers'
        with_peft(TARGETS, shape, results, tiny=options.tiny)
    if not wanted - {"kernels", "snapshots", "prompts", "training", "vllm", "peft"}:
        return
    base = wrap_base(make_model(shape), name="qwen3.5-9b-random")
    if "finetune" in wanted:
        finetune(base, shape, results, tiny=options.tiny)
    if "prefill" in wanted:
        measure_prefill(base, shape, results, tiny=options.tiny)
    if wanted & {"decode", "profile"}:
        kv = KvCache.for_base(base, shape.kv_tokens, PAGE_TOKENS, sequences=shape.max_running)
        bench = Bench(base, shape, kv=kv)
        print(f"compiled and captured in {bench.capture():.1f} s", flush=True)
        asyncio.run(serve(bench, results, wanted, options.bandwidth, tiny=options.tiny))


if __name__ == "__main__":
    main()
