"""Setup of the serving benchmarks: an 8B Llama-3.1 shape with random weights, adapters, an engine in process."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import msgspec
import torch

from benchmarks.common.llama import Llama, llama_config, random_model
from benchmarks.common.timing import synchronize
from coserve.config import Config
from coserve.core.link.engine import Shutdown
from coserve.core.link.generation import Generate, RequestFailed, Tokens
from coserve.core.link.link import FromEngine, ToEngine
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, LoraSettings, Slo
from coserve.engine.engine import Engine
from coserve.engine.job_runner import JobPlaces
from coserve.generate.execution.eager import EagerExecutor
from coserve.generate.execution.graph_executor import GraphExecutor
from coserve.generate.generator import Generator
from coserve.generate.grammars import Grammars
from coserve.kernels.lora.backend import make_backend
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.host_memory import HostMemory
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from coserve.queues.policies.choice import make_policy
from tests.support.fake_ports import FREE, FakeTrainer, Meter
from tests.support.local_link import local_pair

SEED = 7
GREEDY = SamplingParams(temperature=0.0)
SHORT = 16
"""Tokens of an answer that warms up."""
ADAPTERS = 32
RANKS = {"a": (16,), "m": (8, 16, 32, 64)}
"""Ranks of the two sets of adapters, in turn: `a0` to `a31` are alike, `m0` to `m31` are mixed."""


@dataclass(frozen=True)
class Shape(Llama):
    """The base's sizes and the engine's."""

    device: str
    max_running: int
    step_tokens: int
    kv_tokens: int


FULL = Shape(32, 4096, 14336, 32, 8, 128256, 8192, "cuda", 256, 8192, 320_000)
TINY = Shape(2, 64, 128, 4, 2, 512, 256, "cpu", 8, 64, 8192)
"""To try the scripts with, on any machine; its numbers say nothing."""


def make_base(shape: Shape) -> Base:
    return wrap_base(random_model(llama_config(shape), shape.device, SEED), name="llama-8b-random")


def make_adapter(base: Base, seed: int, rank: int, ends: tuple[str, ...] = ("",)) -> LoraWeights:
    """On all sites whose names end so."""
    g = torch.Generator(base.device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=base.device, dtype=base.dtype) * 0.02

    sites = {
        name: LoraPair(draw(rank, site.in_features), draw(site.out_features, rank), 1.0)
        for name, site in base.spec.sites.items()
        if name.endswith(ends)
    }
    return LoraWeights(LoraSettings(r=rank, alpha=rank), sites)


@dataclass(frozen=True)
class Load:
    """Requests of one kind that come all at once."""

    requests: int
    prompt: int
    output: int
    adapters: int = 0
    family: str = "a"
    sampling: SamplingParams = GREEDY

    def make_requests(self, run: str, vocab: int) -> list[Generate]:
        """Every request to its last token; `run` makes the prompts and the ids."""
        chance = random.Random(f"{SEED}/{run}")
        sampling = msgspec.structs.replace(self.sampling, max_tokens=self.output, ignore_eos=True)
        return [
            Generate(
                id=f"{run}/{i}",
                prompt=tuple(chance.randrange(2, vocab) for _ in range(self.prompt)),
                sampling=sampling,
                adapter=AdapterRef(f"{self.family}{i % self.adapters}", 1) if self.adapters else None,
                slo=Slo(ttft=3600.0, tpot=3600.0),
            )
            for i in range(self.requests)
        ]


class Bench:
    """One engine over one base, and the API's end of its link."""

    def __init__(
        self,
        base: Base,
        shape: Shape,
        *,
        kv: KvCache | None = None,
        prefix_cache: bool = False,
        grammars: Grammars | None = None,
        fused: FusedBase | None = None,
    ) -> None:
        """`fused`: None: compiled on a GPU, with the GEMM kernels measured now."""
        self.base, self.shape = base, shape
        config = Config(max_running=shape.max_running, step_tokens=shape.step_tokens, device=shape.device)
        self._made: dict[AdapterRef, LoraWeights] = {}
        self.store = AdapterStore(
            lambda ref, digests: self._made[ref],
            1 << 40,
            memory=HostMemory(0, for_kernels=True) if shape.device == "cuda" else None,
        )
        self.kv = kv or KvCache.for_base(base, shape.kv_tokens, config.page_tokens)
        if fused is None:
            fused = FusedBase(base) if shape.device == "cuda" else FusedBase(base, compiled=False)
        eager = EagerExecutor(base, self.kv, make_backend("segmented"))
        self.executor = GraphExecutor(fused, self.kv, eager, max_running=shape.max_running)
        self.generator = Generator(
            base,
            self.store,
            self.kv,
            self.executor,
            max_running=shape.max_running,
            step_tokens=shape.step_tokens,
            max_queue=4096,
            fair=False,
            prefix_cache=prefix_cache,
            grammars=grammars,
        )
        self.api, engine_end = local_pair()
        self.engine = Engine(
            self.generator,
            FakeTrainer(Meter(), FREE, {}, random.Random(SEED), time.monotonic),  # no job is ever started
            self.store,
            make_policy(config),
            engine_end,
            clock=time.monotonic,
            jobs=JobPlaces(),
        )
        if grammars is not None:
            grammars.notify(self.engine.wake)

    def publish(self, family: str) -> None:
        """The family's 32 adapters, resident from now on."""
        for i in range(ADAPTERS):
            self.publish_one(family, i)

    def publish_one(self, family: str, i: int) -> None:
        ref, ranks = AdapterRef(f"{family}{i}", 1), RANKS[family]
        made = make_adapter(self.base, 1000 * len(ranks) + i, ranks[i % len(ranks)])
        self._made[ref] = self.store.host_copy(made)
        self.store.publish(ref, self._made[ref])

    def capture(self, ranks: Sequence[int] = ()) -> float:
        """Compile, and capture the graphs of steps without adapters and with adapters of rank 16 and these: seconds.

        Rank 16 always: the engine would capture its graphs between two rows.
        """
        began = time.perf_counter()
        self.executor.warm_up((16, *(rank for rank in ranks if rank != 16)))
        synchronize(self.shape.device)
        return time.perf_counter() - began

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """The engine runs."""
        task = asyncio.create_task(self.engine.run())
        yield
        message: ToEngine = Shutdown()
        self.api.send(message)
        await task

    async def serve(self, asked: Sequence[Generate], saw: Callable[[int], None] = lambda tokens: None) -> float:
        """Seconds from the first request's sending to the last token's arrival. `saw` hears the tokens so far."""
        synchronize(self.shape.device)
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
                saw(tokens)
        seconds = time.perf_counter() - began
        wanted = sum(one.sampling.max_tokens for one in asked)
        assert tokens == wanted, f"expected {wanted} tokens, got {tokens}"
        return seconds

    async def speeds(self, load: Load, name: str, repeats: int, warm: int = 1) -> list[float]:
        """Output tokens a second of runs of a load, after `warm` that are not timed: the last with whole answers, those
        before it with short ones. `name`: of the prompts."""
        vocab, short = self.shape.vocab, replace(load, output=min(load.output, SHORT))
        for i in range(warm):
            one = load if i + 1 == warm else short
            await self.serve(one.make_requests(f"{name}/warm{i or ''}", vocab))
        runs = (load.make_requests(f"{name}/{i}", vocab) for i in range(repeats))
        return [load.requests * load.output / await self.serve(asked) for asked in runs]

    def texts(self, asked: Sequence[Generate]) -> dict[str, list[int]]:
        """Token ids by request, through the generator alone: what shares a step does not depend on when things come."""
        for one in asked:
            self.generator.add(one)
        found: defaultdict[str, list[int]] = defaultdict(list)
        while self.generator.running:
            for message in self.generator.step():
                assert isinstance(message, Tokens), message
                found[message.id].extend(message.tokens)
        return dict(found)
