"""Figure 5.1 of the ETS paper, end to end: throughput of GPT-2 medium over the number of adapters and the batch size.

    python -m benchmarks.figure_5_1 --out benchmarks/results      (on a GPU)
    python -m benchmarks.figure_5_1 --plot                        (draws the committed result)

As in its section 5.1.1: bfloat16, a quarter of the adapters each of rank 16, 32, 64 and 128, on `c_attn` and `c_proj`,
adapters of a batch drawn uniformly, 16 sequences and 24 adapters unless they vary. Inference is whole generations through
`Generator` (eager: every way runs the same code around the LoRA terms; `segmented+graphs` is how the daemon runs it);
fine-tuning is forward and backward of one packed batch with every adapter learning. Weights and tokens are random.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config

from coserve.adapters.residency import Residency
from coserve.generate.generator import Generator
from coserve.generate.runner import Runner
from coserve.kernels.attention import PackedAttention
from coserve.kernels.dispatch import Way
from coserve.kernels.segments import LoraPair, Segments
from coserve.link import Generate, RequestFailed
from coserve.memory.adapters import packed_bytes
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.types import AdapterRef, LoraSettings, SamplingParams, Slo

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SEED = 0
RANKS = (16, 32, 64, 128)
BATCH, ADAPTERS = 16, 24
COUNTS = (1, 4, 16, 64)
WAYS = ("segmented", "block_sparse", "grouped", "naive")
GRAPHS = "segmented+graphs"
NAIVE_MOST = 24
"""Beyond that many sequences or adapters `naive` takes minutes, and its fall is plain by then."""


@dataclass(frozen=True)
class Shape:
    """What is measured; the paper's, or a small one to try the script with."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    prompt: int
    output: int
    length: int
    repeats: int


PAPER = Shape(layers=24, hidden=1024, heads=16, vocab=50257, prompt=32, output=24, length=512, repeats=3)
TINY = Shape(layers=2, hidden=64, heads=4, vocab=128, prompt=6, output=3, length=12, repeats=1)


def make_base(shape: Shape, device: str) -> Base:
    config = GPT2Config(
        vocab_size=shape.vocab, n_positions=1024, n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads
    )
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return wrap_base(model, name="gpt2-medium-random")


def make_adapter(base: Base, index: int, *, learns: bool = False) -> LoraWeights:
    g = torch.Generator(base.device).manual_seed(index)
    rank = RANKS[index % len(RANKS)]

    def draw(*size: int) -> torch.Tensor:
        drawn = torch.randn(*size, generator=g, device=base.device, dtype=base.dtype) * 0.02
        return drawn.requires_grad_(learns)

    sites = {
        name: LoraPair(draw(rank, site.in_features), draw(site.out_features, rank), 1.0)
        for name, site in base.spec.sites.items()
        if name.endswith(("c_attn", "c_proj"))
    }
    return LoraWeights(LoraSettings(r=rank), sites)


def synchronize(base: Base) -> None:
    if base.device.type == "cuda":
        torch.cuda.synchronize()


def serving(base: Base, way: str) -> Generator:
    """A generator for at most 64 sequences; its 64 adapters are in memory."""
    most = COUNTS[-1]
    made = {AdapterRef(f"a{i}", 1): make_adapter(base, i) for i in range(COUNTS[-1])}
    residency = Residency(made.__getitem__, len(made))
    for ref, weights in made.items():
        residency.publish(ref, weights)
    page = KvCache.for_base(base, 1, 16).buffer.page_bytes
    in_adapters = sum(-(-packed_bytes(weights) // page) for weights in made.values())
    kv = KvCache.for_base(base, 128 * most + 16 * in_adapters, 16)
    runner = Runner(FusedBase(base), kv, max_running=most) if way == GRAPHS else None
    if runner is not None:
        runner.warm_up()
    chosen = Way.SEGMENTED if way == GRAPHS else Way(way)
    return Generator(
        base, residency, kv, max_running=most, step_tokens=4096, way=chosen, prefix_cache=False, runner=runner
    )


def inference(generator: Generator, shape: Shape, batch: int, adapters: int) -> Callable[[int], int]:
    """One call generates a batch; its argument makes the prompts; returns the tokens generated."""

    def generate(run: int) -> int:
        chance = random.Random(f"{SEED}/{run}")
        for i in range(batch):
            prompt = tuple(chance.randrange(shape.vocab) for _ in range(shape.prompt))
            sampling = SamplingParams(max_tokens=shape.output, temperature=0.0, ignore_eos=True)
            adapter = AdapterRef(f"a{chance.randrange(adapters)}", 1)
            slo = Slo(ttft=1e9, tpot=1e9)
            generator.add(Generate(id=f"{run}/{i}", prompt=prompt, sampling=sampling, adapter=adapter, slo=slo))
        tokens = 0
        while generator.running:
            for message in generator.step():
                assert not isinstance(message, RequestFailed), message
                tokens += len(message.tokens)
        assert tokens == batch * shape.output
        return tokens

    return generate


def finetuning(base: Base, shape: Shape, way: str, batch: int, adapters: int) -> Callable[[int], int]:
    """One call is a forward and a backward of a packed batch of sequences of whatever adapters; returns its tokens."""
    learning = tuple(make_adapter(base, i, learns=True) for i in range(adapters))
    tensors = [t for one in learning for pair in one.sites.values() for t in (pair.a_RD, pair.b_OR)]
    positions = torch.arange(shape.length, device=base.device)

    def step(order: list[int]) -> None:
        bounds = tuple(i * shape.length for i in range(len(order) + 1))
        tokens = torch.randint(shape.vocab, (bounds[-1],), device=base.device)
        lora = LoraBatch(Segments(bounds, tuple(order)), learning, Way.GROUPED if way == "naive" else Way(way))
        with torch.enable_grad(), base.lora(lora):
            logits = base.run(tokens, positions.repeat(len(order)), PackedAttention(bounds), None)
            torch.nn.functional.cross_entropy(logits, tokens.roll(-1)).backward()

    def train(run: int) -> int:
        chance = random.Random(f"{SEED}/{run}")
        order = sorted(chance.randrange(adapters) for _ in range(batch))
        groups = [[a for a in order if a == one] for one in dict.fromkeys(order)] if way == "naive" else [order]
        for group in groups:
            step(group)
        for tensor in tensors:
            tensor.grad = None
        return batch * shape.length

    return train


TASKS = ("inference", "finetuning")


def measure(base: Base, call: Callable[[int], int], repeats: int) -> dict[str, float]:
    """Tokens a second: the median of `repeats` batches after one warm-up, the slowest and the fastest."""
    call(-1)
    speeds = []
    for run in range(repeats):
        synchronize(base)
        began = time.perf_counter()
        tokens = call(run)
        synchronize(base)
        speeds.append(tokens / (time.perf_counter() - began))
    found = {"tok_s": statistics.median(speeds), "low": min(speeds), "high": max(speeds)}
    return {name: round(value, 1) for name, value in found.items()}


def measure_all(base: Base, shape: Shape, ways: Sequence[str]) -> Iterator[dict[str, object]]:
    """Every point of the figure, way by way; what compiles the base comes last."""
    points = [(BATCH, adapters) for adapters in COUNTS] + [(batch, ADAPTERS) for batch in COUNTS]
    for way in ways:
        for task in TASKS:
            if (task, way) == ("finetuning", GRAPHS):
                continue
            generator = serving(base, way) if task == "inference" else None
            for batch, adapters in points:
                if way == "naive" and max(batch, adapters) > NAIVE_MOST:
                    continue
                if generator is None:
                    call = finetuning(base, shape, way, batch, adapters)
                else:
                    call = inference(generator, shape, batch, adapters)
                speeds = measure(base, call, 1 if way == "naive" else shape.repeats)
                yield {"task": task, "way": way, "batch": batch, "adapters": adapters, **speeds}


def summarize(rows: list[dict[str, object]]) -> dict[str, float]:
    """Throughput at 64 adapters over that at 1, at the default batch."""
    speed = {(row["task"], row["way"], row["batch"], row["adapters"]): row["tok_s"] for row in rows}
    found = {}
    for task, way in (("inference", GRAPHS), ("inference", "segmented"), ("finetuning", "segmented")):
        last, first = speed.get((task, way, BATCH, COUNTS[-1])), speed.get((task, way, BATCH, COUNTS[0]))
        if isinstance(last, float) and isinstance(first, float):
            found[f"kernels.figure_5_1.flatness.{task}.{way}"] = round(last / first, 4)
    return found


def run(shape: Shape, device: str, ways: tuple[str, ...], out: Path, commit: str) -> None:
    """Measure and write after every point: a run that is cut short keeps what it has."""
    base = make_base(shape, device)
    record: dict[str, object] = {
        "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "commit": commit,
        "command": " ".join(sys.argv),
        "seed": SEED,
        "date": datetime.now(UTC).date().isoformat(),
        "shape": vars(shape),
    }
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in measure_all(base, shape, ways):
        rows.append(row)
        print(*row.values(), flush=True)
        record |= {"rows": rows, "summary": summarize(rows)}
        (out / "figure_5_1.json").write_text(json.dumps(record, indent=1) + "\n")


def publish() -> None:
    """The figure, and the keys in summary.json, from the committed result."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    record = json.loads((RESULTS / "figure_5_1.json").read_text())
    figure, grid = plt.subplots(2, 2, figsize=(10, 7), constrained_layout=True)
    for line, task in zip(grid, TASKS, strict=True):
        for axes, vary, fixed, value in (
            (line[0], "adapters", "batch", BATCH),
            (line[1], "batch", "adapters", ADAPTERS),
        ):
            for way in (*WAYS, GRAPHS):
                found = [r for r in record["rows"] if r["task"] == task and r["way"] == way and r[fixed] == value]
                curve = sorted((r[vary], r["tok_s"]) for r in found)
                if curve:
                    axes.plot(*zip(*curve, strict=True), marker="o", label=way)
            axes.set(xscale="log", yscale="log", xlabel=f"{vary} ({fixed} {value})", ylabel="tokens/s", title=task)
            axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
            axes.grid(alpha=0.3)
    grid[0][0].legend(fontsize=8)
    figure.suptitle(f"GPT-2 medium, bf16, ranks 16 to 128, {record['hardware']}")
    figure.savefig(ROOT / "docs" / "figures" / "figure_5_1.png", dpi=110)
    path = RESULTS / "summary.json"
    summary = json.loads(path.read_text())
    for key, value in record["summary"].items():
        summary[key] = {
            "value": value,
            "unit": "ratio",
            "target": ">= 0.9",
            "script": "benchmarks/figure_5_1.py",
            "result": "benchmarks/results/figure_5_1.json",
            "date": record["date"],
        }
    path.write_text(json.dumps(dict(sorted(summary.items())), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--plot", action="store_true", help="draw the committed result and put its keys in summary.json"
    )
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU, to try the script")
    parser.add_argument("--commit", default="", help="the commit that is measured")
    given = parser.parse_args()
    if given.plot:
        publish()
    elif given.tiny:
        run(TINY, "cpu", ("naive", "grouped"), given.out, given.commit)
    else:
        run(PAPER, "cuda", (*WAYS, GRAPHS), given.out, given.commit)


if __name__ == "__main__":
    main()
