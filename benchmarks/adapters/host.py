"""How many adapters a step has, and the host time that they cost. No GPU.

    python -m benchmarks.adapters.host --out benchmarks/results

`distinct`: mean number of adapters of a step in the cases of `many.py` at saturation. Its traces go through the
daemon's fair queue into 256 places, all adapters in memory; a step takes `STEP` seconds and at most 2,048 tokens.

`host_us.put`: to put an adapter into a slot of the graphs' table in place of another one. `host_us.resident`: to list
5,000 adapters in memory. `host_us.step`: the adapters' part of preparing a step of 256 sequences and 300 prompt tokens
with so many distinct adapters: slots, footprint, tiles of a mixed graph of 640 tokens. The Llama-3.1-8B shape, rank 8
on q, k, v and o; on a CPU without the copies to a GPU.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.adapters.cases import FULL, S1
from benchmarks.adapters.fleet import llama_sites
from benchmarks.adapters.many import SETTLED, requests_of
from benchmarks.common.options import make_parser
from benchmarks.common.provenance import cpu_name
from benchmarks.common.results import Results
from benchmarks.serving.http_case import SEED
from benchmarks.serving.http_load import LoadRequest
from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings, Slo
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.footprint import LoraFootprint
from coserve.generate.execution.graph_sizes import mixed_tile_capacities
from coserve.generate.execution.slot_lora import StaticSlotLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import VECTOR, LoraPair, SiteGroup
from coserve.lora.store.packing import PackedLayout, PackedSites
from coserve.lora.store.store import AdapterStore
from coserve.model.lora import LoraWeights
from coserve.queues.inference import InferenceQueue
from coserve.queues.request import Request

STEP, STEP_TOKENS = 0.022, 2048
"""Seconds and most tokens of a step. The seconds: 255 running requests over 11,590 output tokens/s, measured with 5
adapters at 50e49e37."""
DISTINCT, PROMPT_TOKENS, GRAPH_TOKENS = (5, 64, 128, 192, 256), 300, 640
CPU, ROUNDS, REGISTERED = torch.device("cpu"), 200, 5000


@dataclass
class Running:
    """A request in a place: tokens that are still to be computed and to be generated."""

    adapter: str
    prompt: int
    tokens: int


def distinct(count: int, exponent: float) -> float:
    """Mean number of adapters of a step after `SETTLED` seconds."""
    names = [f"a{i}" for i in range(count)]
    arrivals = requests_of(FULL, names, exponent, FULL.rate)[::-1]
    queue, places, found = InferenceQueue(len(arrivals), fair=True), list[Running](), list[int]()
    for step in range(int(FULL.seconds / STEP)):
        while arrivals and arrivals[-1].at <= step * STEP:
            queue.push(_request(arrivals.pop()))
        free = FULL.size.max_running - len(places)
        for each in queue.pop(free, free):
            message = each.message
            places.append(Running(str(message.adapter), len(message.prompt), message.sampling.max_tokens))
        left, computed = STEP_TOKENS - len(places), set[str]()
        for own in places:
            taken = min(left, own.prompt)
            left, own.prompt = left - taken, own.prompt - taken
            if taken or not own.prompt:
                computed.add(own.adapter)
            own.tokens -= not own.prompt
        places = [own for own in places if own.tokens]
        if step * STEP >= SETTLED:
            found.append(len(computed))
    return statistics.mean(found)


def _request(each: LoadRequest) -> Request:
    return Request(
        Generate(
            id=str(each.index),
            prompt=tuple(each.prompt),
            sampling=SamplingParams(max_tokens=each.max_tokens),
            adapter=None if each.adapter is None else AdapterRef(each.adapter, 1),
            slo=Slo(ttft=60.0, tpot=1.0),
        )
    )


def adapters(count: int) -> dict[AdapterRef, LoraWeights]:
    """Adapters in the store's layout, all over the same memory."""
    sites = llama_sites(FULL.config, mlp=False)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    pairs = {
        n: LoraPair(empty(S1[0], site.in_features), empty(site.out_features, S1[0]), 1.0) for n, site in sites.items()
    }
    layout = PackedLayout(pairs, VECTOR)
    memory = torch.empty(layout.bytes, dtype=torch.uint8)
    return {
        AdapterRef(f"a{i}", 1): LoraWeights(LoraSettings(r=S1[0]), PackedSites(memory, layout)) for i in range(count)
    }


def slots_of_base() -> AdapterSlots:
    """Slots for as many adapters as run at a time, at all sites of the layers."""
    parts = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
    groups = list[list[SiteGroup]]()
    for layer in range(FULL.config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        names = [tuple(f"{start}{'self_attn' if p in 'qkvo' else 'mlp'}.{p}_proj" for p in own) for own in parts]
        groups.append([SiteGroup(own, index) for index, own in enumerate(names)])
    return AdapterSlots(groups, FULL.size.max_running, CPU)


def microseconds(work: Callable[[], object]) -> list[float]:
    """Of each of `ROUNDS` calls."""
    times = list[float]()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - began))
    return times


def put_us() -> list[float]:
    slots, known = slots_of_base(), adapters(FULL.size.max_running + ROUNDS)
    waiting = iter(known.items())
    for _ in range(FULL.size.max_running):
        slots.place(dict([next(waiting)]))
    return microseconds(lambda: slots.place(dict([next(waiting)])))


def step_us(count: int) -> list[float]:
    slots, own, chance = slots_of_base(), adapters(count), random.Random(0)
    running = FULL.size.max_running
    lengths = [[1] * count for _ in range(2)]
    for each in lengths:  # two steps in turn: an equal one is not loaded again
        for _ in range(running - count):
            each[chance.randrange(count)] += 1
        each[chance.randrange(count)] += PROMPT_TOKENS
    capacities = mixed_tile_capacities(GRAPH_TOKENS, running)
    lora = StaticSlotLora(slots, GRAPH_TOKENS, LoraFootprint(16, slots.all_groups), capacities)
    turn = itertools.cycle(lengths)

    def step() -> None:
        segments = Segments((0, *itertools.accumulate(next(turn))), tuple(slots.place(own)))
        slots.footprint(segments)
        lora.load(segments)

    return microseconds(step)


def resident_us() -> list[float]:
    store = AdapterStore(_nothing, 1 << 50)
    for ref, weights in adapters(REGISTERED).items():
        store.publish(ref, weights)
    assert len(store.resident()) == REGISTERED
    return microseconds(store.resident)


def _nothing(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
    raise AssertionError(f"{ref} was published")


def main() -> None:
    parser = make_parser(__doc__)
    options = parser.parse_args()
    results = Results.of(
        options,
        "adapter_host.json",
        __file__,
        {"step_s": STEP, "prompt_tokens": PROMPT_TOKENS, "graph_tokens": GRAPH_TOKENS, "rounds": ROUNDS},
        seed=SEED,
        hardware=cpu_name(),
    )
    for count, exponent, kind in (*FULL.cases, *FULL.uniform):
        if kind == "s1":
            key = f"adapters.distinct.{count}.{'alpha1' if exponent else 'uniform'}"
            results.put(key, round(distinct(count, exponent), 1), "adapters of a step, simulated")
    for key, times in {
        "put": put_us(),
        "resident": resident_us(),
        **{f"step.{count}": step_us(count) for count in DISTINCT},
    }.items():
        results.put(f"adapters.host_us.{key}", round(statistics.median(times), 1), "us of the host", None, times)


if __name__ == "__main__":
    main()
