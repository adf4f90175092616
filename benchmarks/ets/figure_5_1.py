"""Figure 5.1 of the ETS paper, end to end: throughput of GPT-2 medium over the number of adapters and the batch size.

    python -m benchmarks.ets.figure_5_1 --out benchmarks/results [--budget 500] [--ways segmented,...] [--axes batch] \
        [--tasks finetuning]
    python -m benchmarks.ets.figure_5_1 --plot [FOLDER/figure_5_1.json]     (draws the committed result, with this one \
        in it)
    TRITON_INTERPRET=1 python -m benchmarks.ets.figure_5_1 --tiny --out /tmp/tried

As in its section 5.1.1: bfloat16, a quarter of the adapters each of rank 16, 32, 64 and 128, on `c_attn` and `c_proj`,
adapters of a batch drawn uniformly, 16 sequences and 24 adapters unless they vary. One adapter alone has rank 64, the
nearest to the others' mean of 60: the figure is about their number. Inference is whole generations through
`Generator` (eager: the same code around the LoRA terms for every method; `segmented+graphs` is what the daemon runs);
fine-tuning is forward and backward of one packed batch with every adapter learning (`segmented` adds the gradients to
sums in fp32, as the daemon does; the others leave them to autograd); `segmented+trainer` is the daemon's trainer with
everything that belongs to a step. Weights and tokens are random. Each point is written as soon as it is measured: over
the number of adapters first, then over the batch size.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import GPT2Config

from benchmarks.common.llama import random_model
from benchmarks.common.options import add_names, make_parser
from benchmarks.common.results import Results, merge_results
from benchmarks.common.timing import synchronize
from benchmarks.common.traces import busy, by_kernel, traced
from benchmarks.ets.figure_5_1_report import flatness, publish
from benchmarks.ets.figure_5_1_shape import (
    AS_SEGMENTED,
    AXES,
    FINETUNING_REPEATS,
    GRAPHS,
    METHODS,
    NOT_MEASURED,
    PAPER,
    RANKS,
    SEED,
    TASKS,
    TINY,
    TRAINER,
    Shape,
)
from benchmarks.ets.figure_5_1_trainer import Jobs
from benchmarks.serving.case import make_adapter as random_adapter
from coserve.core.link.generation import Generate, RequestFailed
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.execution.interface import StepExecutor
from coserve.generate.generator import Generator
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.backend import make_backend
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import MainGrads
from coserve.lora.store.host_memory import HostMemory
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.forward_context import running
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraBatch, LoraWeights


def make_base(shape: Shape) -> Base:
    config = GPT2Config(
        vocab_size=shape.vocab, n_positions=1024, n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads
    )
    base = wrap_base(random_model(config, shape.device, SEED), name="gpt2-medium-random")
    FusedBase(base, compiled=False)  # stacks the weights as in the daemon
    return base


def make_adapter(base: Base, index: int, *, learns: bool = False) -> LoraWeights:
    rank = RANKS[index % len(RANKS)]
    weights = random_adapter(base, index, rank, ("c_attn", "c_proj"))
    for pair in weights.sites.values():
        pair.a_RD.requires_grad_(learns)
        pair.b_OR.requires_grad_(learns)
    return weights


def with_main_grads(weights: LoraWeights) -> LoraWeights:
    """The same adapter with fp32 sums, to which the kernels add its gradients."""
    sites = {
        name: replace(
            pair, main_grads=MainGrads(torch.zeros_like(pair.a_RD).float(), torch.zeros_like(pair.b_OR).float())
        )
        for name, pair in weights.sites.items()
    }
    return LoraWeights(weights.settings, sites)


def serving(base: Base, shape: Shape, method: str) -> Generator:
    """A generator for as many sequences, with as many adapters in memory, as there are in any point."""
    most = max(shape.counts)
    made = {AdapterRef(f"a{i}", 1): make_adapter(base, i) for i in range(max(most, shape.adapters))}
    memory = HostMemory(0, for_kernels=True) if shape.device == "cuda" else None
    store = AdapterStore(lambda ref, digests: made[ref], 1 << 40, memory=memory)
    for ref, weights in made.items():
        store.publish(ref, store.host_copy(weights))
    kv = KvCache.for_base(base, shape.kv_tokens, 16)
    executor: StepExecutor
    executor = eager = EagerExecutor(base, kv, make_backend("segmented" if method == GRAPHS else method))
    if method == GRAPHS:
        fused = FusedBase(base) if shape.device == "cuda" else FusedBase(base, compiled=False)
        executor = GraphExecutor(fused, kv, eager, max_running=most)
    return Generator(base, store, kv, executor, max_running=most, step_tokens=4096, prefix_cache=False)


def ask(generator: Generator, shape: Shape, batch: int, adapters: int, run: int) -> None:
    """A batch of requests; `run` makes the prompts, and whose adapters they name."""
    chance = random.Random(f"{SEED}/{run}")
    for i in range(batch):
        prompt = tuple(chance.randrange(shape.vocab) for _ in range(shape.prompt))
        sampling = SamplingParams(max_tokens=shape.output, temperature=0.0, ignore_eos=True)
        adapter = AdapterRef(f"a{chance.randrange(adapters)}", 1)
        slo = Slo(ttft=1e9, tpot=1e9)
        generator.add(Generate(id=f"{run}/{i}", prompt=prompt, sampling=sampling, adapter=adapter, slo=slo))


def inference(generator: Generator, shape: Shape, batch: int, adapters: int) -> Callable[[int], int]:
    """One call generates a batch; its argument makes the prompts; returns the tokens generated."""

    def generate(run: int) -> int:
        ask(generator, shape, batch, adapters, run)
        tokens = 0
        while generator.running:
            for message in generator.step():
                assert not isinstance(message, RequestFailed), message
                tokens += len(message.tokens)
        assert tokens == batch * shape.output
        return tokens

    return generate


def finetuning(base: Base, shape: Shape, method: str, batch: int, adapters: int) -> Callable[[int], int]:
    """One call is a forward and a backward of a packed batch of sequences of whatever adapters; returns its tokens."""
    learning = tuple(make_adapter(base, i, learns=True) for i in range(adapters))
    if method == "segmented":  # as in the daemon
        learning = tuple(with_main_grads(one) for one in learning)
    tensors = [[t for pair in one.sites.values() for t in (pair.a_RD, pair.b_OR)] for one in learning]
    positions = torch.arange(shape.length, device=base.device)

    backend = make_backend(method)

    def step(order: list[int]) -> None:
        bounds = tuple(i * shape.length for i in range(len(order) + 1))
        tokens = torch.randint(shape.vocab, (bounds[-1],), device=base.device)
        present = tuple(dict.fromkeys(order))  # a batch names the adapters that it has, as the daemon's do
        segments = Segments(bounds, tuple(present.index(adapter) for adapter in order))
        lora = LoraBatch(segments, tuple(learning[a] for a in present), backend)
        with torch.enable_grad(), running(base.prepare(lora)):
            logits = base.run(tokens, positions.repeat(len(order)), PackedAttention(bounds), None)
            torch.nn.functional.cross_entropy(logits, tokens.roll(-1)).backward()  # type: ignore[no-untyped-call]

    def train(run: int) -> int:
        chance = random.Random(f"{SEED}/{run}")
        order = sorted(chance.randrange(adapters) for _ in range(batch))
        groups = [[a for a in order if a == one] for one in dict.fromkeys(order)] if method == "naive" else [order]
        for group in groups:
            step(group)
        for adapter in set(order) if method != "segmented" else ():
            for tensor in tensors[adapter]:
                tensor.grad = None
        return batch * shape.length

    return train


def measure(
    base: Base,
    call: Callable[[int], int],
    batches: int,
    repeats: int,
    warm_ups: int,
    prepare: Callable[[], bool] | None = None,
) -> list[float]:
    """Tokens a second of `repeats` runs of so many batches in turn. `prepare`: what the daemon does when it has nothing
    to do, until it is False."""
    for run in range(warm_ups):
        call(run % batches)
        while prepare is not None and prepare():
            pass
    speeds = []
    for run in range(repeats):
        synchronize(base.device)
        began = time.perf_counter()
        tokens = call(run % batches)
        synchronize(base.device)
        speeds.append(tokens / (time.perf_counter() - began))
    return speeds


Point = tuple[str, str, int, int]
"""Task, method, sequences, adapters."""


def points(
    shape: Shape, methods: Sequence[str], axes: Sequence[str], tasks: Sequence[str] = TASKS
) -> Iterator[list[Point]]:
    """The points that one generator, or one kind of training, serves: axis by axis, method by method."""
    ends_first = (shape.counts[0], shape.counts[-1], *shape.counts[1:-1])  # the flatness is between the ends
    of = {
        "adapters": [(shape.batch, count) for count in ends_first],
        "batch": [(count, shape.adapters) for count in shape.counts],
    }
    for axis in (of[name] for name in axes):
        for method in methods:
            for task in tasks:
                if (task, method) not in NOT_MEASURED:
                    most = shape.naive_most if method == "naive" else max(shape.counts)
                    yield [(task, method, batch, adapters) for batch, adapters in axis if max(batch, adapters) <= most]


@contextlib.contextmanager
def calls(
    base: Base, shape: Shape, method: str, batch: int, adapters: int, generator: Generator | None
) -> Iterator[tuple[Callable[[int], int], Callable[[], bool] | None]]:
    """What `measure` calls for a point: the batch, and `prepare`."""
    if generator is not None:
        yield inference(generator, shape, batch, adapters), generator.prepare
    elif method == TRAINER:
        ranks = [RANKS[index % len(RANKS)] for index in range(adapters)]
        backend = "segmented" if shape.device == "cuda" else "grouped"
        with Jobs(base, backend, length=shape.length, batch=batch, ranks=ranks) as jobs:
            yield jobs.train, None
    else:
        yield finetuning(base, shape, method, batch, adapters), None


def kernels_of_batch(base: Base, call: Callable[[int], int]) -> dict[str, object]:
    """The kernels of one batch, and the milliseconds in which the device computes them; the rest it waits."""
    kernels = traced(lambda: call(0), base.device, host=False)
    named = [" ".join(map(str, one)) for one in by_kernel(kernels, 1)]
    return {"busy_ms": round(busy(kernels) / 1e3, 3), "kernels": named}


def measure_all(
    base: Base,
    shape: Shape,
    methods: Sequence[str],
    axes: Sequence[str],
    tasks: Sequence[str],
    results: Results,
    deadline: float,
    *,
    profile: bool = False,
) -> None:
    for group in points(shape, methods, axes, tasks):
        generator = None
        gc.collect()  # the group before had pages and graphs of its own
        gc.freeze()  # as the engine does
        for task, method, batch, adapters in group:
            name = f"{task}.{method}.b{batch}.a{adapters}"
            if time.monotonic() > deadline:
                print(f"no time was left for {name}", flush=True)
                continue
            batches = 1 if method == "naive" else shape.repeats
            # A fine-tuning batch takes a tenth of a second, most of it the host's, which other work disturbs.
            repeats = FINETUNING_REPEATS * batches if task == "finetuning" and method in AS_SEGMENTED else batches
            # Our kernels are compiled for each width of ranks: every batch is run before it is timed.
            warm_ups = 2 * batches if method.startswith("segmented") else 1
            if task == "inference":
                generator = generator or serving(base, shape, method)
            try:
                with calls(base, shape, method, batch, adapters, generator) as (call, prepare):
                    speeds = measure(base, call, batches, repeats, warm_ups, prepare)
                    about = kernels_of_batch(base, call) if profile else {}
            except torch.OutOfMemoryError as error:
                print(f"{name} does not fit: {str(error).splitlines()[0]}", flush=True)
                continue
            about |= {"task": task, "way": method, "batch": batch, "adapters": adapters}
            results.put(name, round(statistics.median(speeds), 1), "tok/s", None, speeds, about)


def main() -> None:
    parser = make_parser(__doc__, tiny="a small shape on the CPU, to try the script")
    parser.add_argument(
        "--plot",
        nargs="*",
        type=Path,
        help="take in the results named, draw all, put the keys in summary.json, and stop",
    )
    for option, known in (("--ways", METHODS), ("--axes", AXES), ("--tasks", TASKS)):
        add_names(parser, option, known, what=option[2:])
    parser.add_argument("--profile", action="store_true", help="list the kernels of a batch in each row")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no point is begun")
    given = parser.parse_args()
    if given.plot is not None:
        for file in given.plot:
            merge_results(file)
        publish()
        return
    deadline, shape = time.monotonic() + given.budget, TINY if given.tiny else PAPER
    results = Results.of(given, "figure_5_1.json", __file__, vars(shape) | {"ranks": RANKS}, seed=SEED)
    base = make_base(shape)
    measure_all(base, shape, given.ways, given.axes, given.tasks, results, deadline, profile=given.profile)
    print(json.dumps({key: value for key, (value, _) in flatness(results.rows(), shape).items()}, indent=1))


if __name__ == "__main__":
    main()
