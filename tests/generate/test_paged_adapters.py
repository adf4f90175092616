"""Texts with more adapters than the pool has room for are those with room for all: adapters come, go and come back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec
import pytest

from coserve.core.errors import AdapterNotFound, AdapterTooLarge, PromptTooLong
from coserve.core.link.generation import Generate, RequestFailed, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterDigests, AdapterRef, Slo
from coserve.generate.generator import Generator
from coserve.kernels.lora.interface import LoraBackend
from coserve.lora.store.entry import State
from coserve.lora.store.host_memory import HostMemory
from coserve.lora.store.packing import packed_bytes
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from tests.support import generation
from tests.support.executors import eager, graphs
from tests.support.lengths import OneMoreToken
from tests.support.lora_backends import GROUPED, SEGMENTED
from tests.support.tiny_models import VOCAB, tiny_model

REFS = [AdapterRef(f"a{i}", 1) for i in range(7)]
PAGE = 16
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=9, temperature=1.2, top_k=30, ignore_eos=True, seed=7)


def adapter(base: Base, ref: AdapterRef) -> LoraWeights:
    """Of rank 1 to 7, on the host; a new object each time, as from a file."""
    number = REFS.index(ref)
    return generation.adapter(base, number, 1 + number)


def pages_of(base: Base, ref: AdapterRef) -> int:
    return KvCache.for_base(base, 1, PAGE).buffer.pages_for(packed_bytes(adapter(base, ref)))


def requests() -> list[Generate]:
    chance = random.Random(0)
    found = []
    for i in range(24):
        tokens = tuple(chance.randrange(3, VOCAB) for _ in range(chance.choice((2, 12, 15, 30))))
        ref = None if i % 8 == 7 else chance.choice(REFS)
        sampling = chance.choice((GREEDY, DRAWN))
        found.append(Generate(id=str(i), prompt=tokens, sampling=sampling, adapter=ref, slo=Slo(ttft=1, tpot=1)))
    return found


class Paged:
    """A generator over a pool of `pages`, its adapters in a host tier of `capacity`."""

    def __init__(
        self, base: Base, pages: int, capacity: int, lora_backend: LoraBackend, fused: FusedBase | None
    ) -> None:
        self.reads = 0

        def load(ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
            if ref not in REFS:
                raise AdapterNotFound(f"no adapter {ref}")
            self.reads += 1
            return adapter(base, ref)

        self.store = AdapterStore(
            load,
            capacity * packed_bytes(adapter(base, REFS[len(REFS) // 2])),
            memory=HostMemory(0, for_kernels=True) if base.device.type == "cuda" else None,
        )
        self.kv = KvCache.for_base(base, pages * PAGE, PAGE)
        plain = eager(base, self.kv, lora_backend)
        executor = plain if fused is None else graphs(fused, self.kv, lora_backend, max_running=8)
        self.generator = Generator(
            base, self.store, self.kv, executor, max_running=8, step_tokens=64, lengths=OneMoreToken()
        )

    def texts(self, asked: list[Generate]) -> dict[str, list[int]]:
        return self.texts_beside(asked, held=0)

    def texts_beside(self, asked: list[Generate], held: int) -> dict[str, list[int]]:
        """While somebody else holds `held` pages."""
        found: dict[str, list[int]] = {one.id: [] for one in asked}
        waiting = list(asked)
        while waiting or self.generator.running:
            while waiting and self.generator.running < 4:
                self.generator.add(waiting.pop(0))
            for message in self.generator.step():
                assert isinstance(message, Tokens), message
                found[message.id].extend(message.tokens)
            self.kv.pool.check_integrity()
        assert self.kv.pool.used == held
        return found


def check(base: Base, lora_backend: LoraBackend, fuse: Callable[[Base], FusedBase] | None) -> None:
    asked = requests()
    largest = pages_of(base, REFS[-1])
    expected = Paged(base, 40 + len(REFS) * largest, len(REFS), lora_backend, None).texts(asked)
    assert len({tuple(text) for text in expected.values()}) == len(asked)
    small = Paged(base, largest + 5, 3, lora_backend, None if fuse is None else fuse(base))
    assert small.texts(asked) == expected
    assert small.reads > len(REFS), "the host tier is too small for all as well"
    assert small.generator.scheduler.preemptions > 0


@pytest.mark.slow
def test_one_step_at_a_time() -> None:
    check(wrap_base(tiny_model("llama"), name="llama", eos_token_ids=()), GROUPED, None)


@pytest.mark.slow
def test_addresses_of_an_adapter_that_left_are_never_used() -> None:
    """It comes back elsewhere, and that is where graphs read it, too."""
    base = wrap_base(tiny_model("gpt2"), name="gpt2", eos_token_ids=())
    turn = [one(5, 2, REFS[2])]
    paged = Paged(base, 40, 2, GROUPED, FusedBase(base, compiled=False))
    expected = paged.texts(turn)
    assert expected == Paged(base, 40, 2, GROUPED, None).texts(turn)
    pool, garbage = paged.kv.pool, paged.kv.buffer.bytes[:-1]
    pages = pool.allocate(40)
    assert pages is not None
    garbage.fill_(0xFF)  # NaN
    pool.free(pages)
    in_the_way = pool.allocate_span(1)
    assert paged.generator.adapter_pages == 1, "the adapter's pages are gone"
    assert in_the_way is not None
    assert paged.texts_beside(turn, held=1) == expected
    assert paged.reads == 1, "it came back from the host"


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_on_a_gpu_through_graphs(family: str) -> None:
    base = wrap_base(tiny_model(family).to("cuda"), name=family, eos_token_ids=())
    check(base, SEGMENTED, FusedBase)


def one(base_tokens: int, max_tokens: int, ref: AdapterRef | None) -> Generate:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Generate(id="x", prompt=(5,) * base_tokens, sampling=sampling, adapter=ref, slo=Slo(ttft=1, tpot=1))


def test_what_fits_the_pool_beside_its_adapter_runs_and_what_does_not_is_refused() -> None:
    base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())
    pages = pages_of(base, REFS[0])
    paged = Paged(base, pages + 2, 3, GROUPED, None)
    # The last token's keys and values are not needed: 33 tokens fit two pages.
    assert len(paged.texts([one(10, 23, REFS[0])])["x"]) == 23
    with pytest.raises(PromptTooLong, match=r"32 beside the adapter a0@1\), got 10 and 24"):
        paged.generator.add(one(10, 24, REFS[0]))
    with pytest.raises(
        AdapterTooLarge, match=rf"pool of {pages + 2} pages.*got 'a6@1' of {pages_of(base, REFS[-1])} pages"
    ):
        paged.generator.add(one(1, 1, REFS[-1]))
    with pytest.raises(AdapterNotFound):
        paged.generator.add(one(1, 1, AdapterRef("nobody", 1)))
    assert len(paged.texts([one(10, 24, None)])["x"]) == 24
    assert paged.generator.running == 0
    assert paged.store.resident() == (REFS[0], REFS[-1])
    paged.store.drop(REFS[-1])
    with pytest.raises(AssertionError):
        paged.store.release(REFS[0])  # nobody holds it any more


def test_a_deleted_adapter_serves_those_who_have_it_and_leaves_no_pages() -> None:
    base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())
    paged = Paged(base, 40, 3, GROUPED, None)
    alone = paged.texts([one(10, 8, REFS[2])])["x"]
    paged.generator.add(one(10, 8, REFS[2]))
    paged.generator.step()
    paged.store.drop(REFS[2])
    found: list[int] = []
    while paged.generator.running:
        found += [token for message in paged.generator.step() for token in message.tokens]
    assert found == alone[1:]
    assert paged.generator.adapter_pages == 0


def test_a_request_starts_when_it_has_pages_and_not_when_it_is_let_in() -> None:
    base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())
    paged = Paged(base, pages_of(base, REFS[0]) + 2, 3, GROUPED, None)
    first, second = one(10, 5, REFS[0]), msgspec.structs.replace(one(40, 5, None), id="second")
    paged.generator.add(first)
    paged.generator.add(second)
    scheduler, seen = paged.generator.scheduler, list[str]()
    while paged.generator.running:
        messages, started, _ = paged.generator.run(scheduler.commit(scheduler.propose(), now=0.0))
        seen += [f"{id} starts" for id in started]
        seen += [f"{message.id} ends" for message in messages if isinstance(message, Tokens) and message.finished]
    assert seen == ["x starts", "x ends", "second starts", "second ends"]


def test_a_request_whose_adapter_cannot_be_loaded_any_more_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    base = wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())
    paged = Paged(base, 40, 3, GROUPED, None)
    paged.generator.add(one(10, 5, REFS[0]))
    paged.generator.add(msgspec.structs.replace(one(10, 5, None), id="second"))
    monkeypatch.setattr(paged.store, "failure", lambda ref: AdapterNotFound(f"no adapter {ref}"))
    messages: list[Tokens | RequestFailed] = []
    while paged.generator.running:
        messages += paged.generator.step()
    assert [(own.id, own.code) for own in messages if isinstance(own, RequestFailed)] == [("x", "adapter_not_found")]
    assert sum(len(own.tokens) for own in messages if isinstance(own, Tokens) and own.id == "second") == 5
    assert paged.kv.pool.used == 0


async def test_nothing_can_run_while_the_adapter_of_the_first_is_read_again() -> None:
    """Its GPU copy was evicted before the request began, and its host copy before the request came."""
    base = wrap_base(tiny_model("gpt2"), name="gpt2", eos_token_ids=())
    paged, read = Paged(base, 40, 1, GROUPED, None), asyncio.Event()
    generator, store, pool = paged.generator, paged.store, paged.kv.pool
    store.notify(read.set)
    alone = paged.texts([one(3, 6, REFS[2])])["x"]
    store.acquire(REFS[1])
    store.release(REFS[1])
    asked = one(3, 6, REFS[2])
    assert store.ready(REFS[2])
    generator.add(asked)
    assert not generator.scheduler.propose().blocked
    pages = pool.allocate(40)
    assert pages is not None
    pool.free(pages)
    assert store.state(REFS[2]) is State.READING
    assert generator.scheduler.propose().blocked
    assert generator.step() == []
    await read.wait()
    assert not generator.scheduler.propose().blocked
    found: list[int] = []
    while generator.running:
        found += [token for message in generator.step() for token in message.tokens]
    assert found == alone
    store.close()
