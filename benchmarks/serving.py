"""Serving in process, through the engine: offline throughput and decode speed with none, one and many adapters.

    python benchmarks/serving.py --out benchmarks/results

An 8B Llama-3.1 shape with random bf16 weights, made on the GPU; adapters of rank 16 on all seven sites of a layer.
Greedy, every request to its last token. Nothing here is timed in tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
import transformers
import triton
from transformers import AutoModelForCausalLM, LlamaConfig

from coserve.adapters.residency import Residency
from coserve.config import Config
from coserve.engine import Engine
from coserve.generate.generator import Generator
from coserve.generate.runner import INDUCTOR, Runner
from coserve.kernels.dispatch import Way
from coserve.kernels.segments import LoraPair
from coserve.link import FromEngine, Generate, RequestFailed, Shutdown, ToEngine, Tokens, local_pair
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from coserve.queues.policy import make_policy
from coserve.types import AdapterRef, LoraSettings, SamplingParams, Slo

SEED = 7
RANK = 16
MAX_RUNNING = 256
STEP_TOKENS = 8192
KV_TOKENS = 320_000
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    key: str
    requests: int
    prompt: int
    output: int
    adapters: int
    target: float | None
    repeats: int = 3
    sampling: SamplingParams = GREEDY


ROWS = (
    Work("serving.decode_tok_s.b64.a0", 64, 16, 256, 0, 10431),
    Work("serving.decode_tok_s.b32.a0", 32, 16, 256, 0, 5830),
    Work("serving.decode_tok_s.b1.a0", 1, 16, 256, 0, 201),
    Work("serving.decode_tok_s.b64.a1", 64, 16, 256, 1, 7488),
    Work("serving.decode_tok_s.b32.a1", 32, 16, 256, 1, 4245),
    Work("serving.decode_tok_s.b1.a1", 1, 16, 256, 1, 190),
    Work("serving.decode_tok_s.b64.a32", 64, 16, 256, 32, 8500),
    Work("serving.decode_tok_s.b32.a32", 32, 16, 256, 32, 4700),
    Work("serving.decode_tok_s.b64.a0.drawn", 64, 16, 256, 0, None, 1, SamplingParams(temperature=0.8)),
    Work("serving.decode_tok_s.b64.a0.top_p", 64, 16, 256, 0, None, 1, SamplingParams(temperature=0.8, top_p=0.95)),
    Work("serving.out_tok_s.512x128.a0", 512, 512, 128, 0, 6796, 2),
    Work("serving.out_tok_s.512x128.a1", 512, 512, 128, 1, 4821, 2),
    Work("serving.out_tok_s.512x128.a32", 512, 512, 128, 32, 6000, 2),
)


class NoJobs:
    """A trainer that is never asked."""

    def mid_batch(self, job: str) -> bool:
        raise AssertionError(job)

    start = advance = checkpoint = drop = mid_batch


def llama_8b(layers: int) -> Base:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        bos_token_id=128000,
        eos_token_id=128001,
    )
    torch.manual_seed(SEED)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return wrap_base(model, name="llama-8b-random")


def adapter(base: Base, seed: int) -> LoraWeights:
    g = torch.Generator(base.device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=base.device, dtype=base.dtype) * 0.02

    sites = {
        name: LoraPair(draw(RANK, site.in_features), draw(site.out_features, RANK), 1.0)
        for name, site in base.spec.sites.items()
    }
    return LoraWeights(LoraSettings(r=RANK, alpha=RANK), sites)


def requests(work: Work, run: str) -> list[Generate]:
    chance = random.Random(f"{SEED}/{work.key}/{run}")
    sampling = msgspec.structs.replace(work.sampling, max_tokens=work.output, ignore_eos=True)
    return [
        Generate(
            id=f"{work.key}/{run}/{i}",
            prompt=tuple(chance.randrange(1000, 120_000) for _ in range(work.prompt)),
            sampling=sampling,
            adapter=AdapterRef(f"a{i % work.adapters}", 1) if work.adapters else None,
            slo=Slo(ttft=3600.0, tpot=3600.0),
        )
        for i in range(work.requests)
    ]


class Bench:
    """One engine over one base, and the API's end of its link."""

    def __init__(self, base: Base, options: dict[str, bool], *, torch_rows: bool) -> None:
        began = time.perf_counter()
        config = Config(inference_batch_size=MAX_RUNNING, step_tokens=STEP_TOKENS, device="cuda")
        self.base = base
        made: dict[AdapterRef, LoraWeights] = {}
        self.residency = Residency(made.__getitem__, 64)
        for i in range(32):
            self.residency.publish(AdapterRef(f"a{i}", 1), adapter(base, i))
        kv = KvCache.for_base(base, KV_TOKENS, config.page_tokens)
        fused = FusedBase(base, options=INDUCTOR | options)
        if torch_rows:
            fused.single = {}
        print("one row, by inputs and outputs:", fused.single, flush=True)
        self.runner = Runner(fused, kv, max_running=MAX_RUNNING)
        self.runner.warm_up()
        torch.cuda.synchronize()
        self.start_seconds = time.perf_counter() - began
        self.generator = Generator(
            base,
            self.residency,
            kv,
            max_running=MAX_RUNNING,
            step_tokens=STEP_TOKENS,
            way=Way.SEGMENTED,
            prefix_cache=False,
            runner=self.runner,
        )
        self.api, engine_end = local_pair()
        self.engine = Engine(
            self.generator,
            NoJobs(),
            self.residency,
            make_policy(config),
            engine_end,
            max_running=MAX_RUNNING,
            max_queue=4096,
            fair=False,
            max_active_jobs=1,
            step_tokens=STEP_TOKENS,
            clock=time.monotonic,
        )

    async def run(self, work: Work, run: str) -> float:
        """Output tokens per second from the first request's sending to the last token's arrival."""
        asked = requests(work, run)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for one in asked:
            self.api.send(one)
        left, tokens = len(asked), 0
        while left:
            message: FromEngine = await self.api.receive()
            assert not isinstance(message, RequestFailed), message
            if isinstance(message, Tokens):
                tokens += len(message.tokens)
                left -= message.finished is not None
        seconds = time.perf_counter() - began
        assert tokens == work.requests * work.output, f"expected every token, got {tokens}"
        return tokens / seconds


async def measure(bench: Bench, rows: Sequence[Work]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    task = asyncio.create_task(bench.engine.run())
    for work in rows:
        await bench.run(work, "warm")
        found[work.key] = [await bench.run(work, str(i)) for i in range(work.repeats)]
        print(work.key, [round(value) for value in found[work.key]], "target", work.target, flush=True)
    message: ToEngine = Shutdown()
    bench.api.send(message)
    await task
    return found


def profile(bench: Bench, batch: int, adapters: int, prompt: int = 16, warm: int = 20, steps: int = 20) -> str:
    """Kernel times of decode steps, and the share of the time in which the GPU had nothing to do."""
    work = Work(f"profile.b{batch}.a{adapters}", batch, prompt, steps + 40, adapters, None)
    for one in requests(work, "p"):
        bench.generator.add(one)
    for _ in range(warm):
        bench.generator.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        began = time.perf_counter()
        for _ in range(steps):
            bench.generator.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    while bench.generator.running:
        bench.generator.step()
    spans: dict[str, tuple[int, float]] = {}
    busy: list[tuple[float, float]] = []
    for event in found.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, total = spans.get(event.name, (0, 0.0))
            spans[event.name] = (count + 1, total + event.time_range.elapsed_us())
            busy.append((event.time_range.start, event.time_range.end))
    busy.sort()
    covered, end = 0.0, float("-inf")
    for start, stop in busy:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    window = busy[-1][1] - busy[0][0]
    lines = [f"== {work.key}: {seconds / steps * 1e3:.3f} ms a step, GPU busy {covered / window:.1%} of the time"]
    for name, (count, total) in sorted(spans.items(), key=lambda item: -item[1][1])[:22]:
        lines.append(f"{total / steps:9.1f} us/step {count / steps:7.1f} calls  {name[:110]}")
    return "\n".join(lines)


def command() -> str:
    """How this was called, without where it wrote to."""
    hidden = {"--out", "--commit"}
    shown = [a for a, before in zip(sys.argv[1:], sys.argv, strict=False) if not {a, before} & hidden]
    return " ".join(["python benchmarks/serving.py", *shown])


def reached(key: str, values: Sequence[float]) -> bool | None:
    target = next(work.target for work in ROWS if work.key == key)
    return None if target is None else statistics.median(values) >= target


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def write(out: Path, found: dict[str, list[float]], start_seconds: float, revision: str) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    rows = {work.key: work for work in ROWS}
    record = {
        "hardware": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
        },
        "commit": revision,
        "command": command(),
        "seed": SEED,
        "date": now,
        "start_seconds": round(start_seconds, 1),
        "settings": {"max_running": MAX_RUNNING, "step_tokens": STEP_TOKENS, "kv_tokens": KV_TOKENS, "rank": RANK},
        "rows": {
            key: {
                "tok_s": round(statistics.median(values), 1),
                "low": round(min(values), 1),
                "high": round(max(values), 1),
                "target": rows[key].target,
                "reached": reached(key, values),
            }
            for key, values in found.items()
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "serving.json").write_text(json.dumps(record, indent=1) + "\n")
    summary_path = out / "summary.json"
    summary = json.loads(summary_path.read_text()) if summary_path.exists() else {}

    def put(key: str, value: float, unit: str, target: float | None) -> None:
        summary[key] = {
            "value": value,
            "unit": unit,
            "target": target,
            "script": "benchmarks/serving.py",
            "result": "benchmarks/results/serving.json",
            "date": now,
        }

    for key, values in found.items():
        put(key, round(statistics.median(values), 1), "output tok/s", rows[key].target)
    base, many = "serving.out_tok_s.512x128.a0", "serving.out_tok_s.512x128.a32"
    if base in found and many in found:
        kept = statistics.median(found[many]) / statistics.median(found[base])
        put("serving.lora_retention.a32", round(kept, 4), "fraction", 0.85)
    summary_path.write_text(json.dumps(dict(sorted(summary.items())), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rows", default="", help="only keys that contain one of these, separated by commas")
    parser.add_argument(
        "--profile", default="", help="BATCH.ADAPTERS,... (decode steps) or BATCH.ADAPTERS.PROMPT (prompts) to profile"
    )
    parser.add_argument("--inductor", default="", help="options of torch._inductor to switch on")
    parser.add_argument("--torch-rows", action="store_true", help="steps of one row through torch's own products")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    began = time.perf_counter()
    base = llama_8b(options.layers)
    print(f"base after {time.perf_counter() - began:.1f} s", flush=True)
    bench = Bench(base, {name: True for name in options.inductor.split(",") if name}, torch_rows=options.torch_rows)
    print(f"compiled and captured in {bench.start_seconds:.1f} s", flush=True)
    for pair in options.profile.split(",") if options.profile else ():
        batch, adapters, *prompt = map(int, pair.split("."))
        if prompt:  # its first steps, of prompts alone
            profile(bench, batch, adapters, *prompt, warm=1, steps=3)
            print(profile(bench, batch, adapters, *prompt, warm=1, steps=3), flush=True)
        else:
            print(profile(bench, batch, adapters), flush=True)
    wanted = [part for part in options.rows.split(",") if part]
    rows = [work for work in ROWS if not wanted or any(part in work.key for part in wanted)]
    if wanted != ["none"]:
        found = asyncio.run(measure(bench, rows))
        write(options.out, found, bench.start_seconds, options.commit or commit())


if __name__ == "__main__":
    main()
