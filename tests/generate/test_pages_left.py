"""Thousands of requests with cancels over the real scheduler, pool, prefix cache and adapters, and a base that is a
function.

Each slot of a page holds a mark of everything that its keys and values would depend on, so that a page in the wrong
hands shows at once; and each token is a function of the marks before it. A recurrent state is the mark of the last
token that it has seen. Adapters have real matrices in the same pages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from zlib import crc32

import pytest
import torch

from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterDigests, AdapterRef, LoraSettings, Slo
from coserve.generate.output_lengths import OutputLengths
from coserve.generate.plan import Scheduled
from coserve.generate.schedule import Scheduler
from coserve.kernels.lora.types import LoraPair
from coserve.lora.store.pages import Activated
from coserve.lora.store.store import AdapterStore
from coserve.memory.buffer import ALIGNMENT, PageBuffer
from coserve.memory.prefix import PageKeys
from coserve.memory.state_pool import StateSlots
from coserve.model.lora import LoraWeights
from coserve.queues.request import Request
from tests.support.lengths import OneMoreToken
from tests.support.pages import BarePages, next_scheduled

PAGES, PAGE_TOKENS, STEP_TOKENS, RUNNING = 64, 4, 48, 12
PAGE_BYTES = 2 * ALIGNMENT
REFS = [AdapterRef("a", 1), AdapterRef("a", 2), *(AdapterRef(f"n{i}", 1) for i in range(6))]
RESIDENT = 20 * PAGE_BYTES
"""Of 72 pages of all adapters."""


def load(ref: AdapterRef, digests: AdapterDigests | None = None) -> LoraWeights:
    """An adapter of 2, 4, ... or 16 pages, full of its number."""
    number = 1 + REFS.index(ref)
    matrices = torch.full((number, ALIGNMENT // 2), float(number)), torch.full((ALIGNMENT // 2, number), float(number))
    return LoraWeights(LoraSettings(r=number), {"site": LoraPair(*matrices, 1.0)})


def is_in_pages(ref: AdapterRef, weights: LoraWeights) -> bool:
    number, pair = float(1 + REFS.index(ref)), weights.sites["site"]
    return bool((pair.a_RD == number).all() and (pair.b_OR == number).all())


class CountingStore(AdapterStore):
    """Counts adapters that enter pages, and moves the marks of pages that are in their way."""

    def __init__(self, slots: list[list[int]]) -> None:
        super().__init__(load, RESIDENT)
        self.marks = slots
        self.entered = self.moved = 0

    def activate(self, ref: AdapterRef) -> Activated | None:
        activated = super().activate(ref)
        if activated is not None:
            self.entered += 1
            self.moved += len(activated.moved)
            for page, to in activated.moved.items():
                self.marks[to] = self.marks[page]
        return activated


class Memory(BarePages):
    """Pages of tokens and adapters, as the generator has them; the tokens' part is a list of marks."""

    def __init__(self, pages: int = PAGES, state_pages: int = 0) -> None:
        """`state_pages`: of a snapshot of a recurrent state; 0: the base has none."""
        super().__init__(pages, PAGE_TOKENS)
        self.state_pages, self.states = state_pages, [0] * RUNNING
        buffer = PageBuffer(pages, PAGE_BYTES, torch.device("cpu"))
        self.pool = buffer.pool
        self.slots = [[0] * PAGE_TOKENS for _ in range(pages)]
        self.store = CountingStore(self.slots)
        self.store.use_pool(buffer, lambda ref: None)

    def allocate(self, n: int) -> list[int] | None:
        pages = super().allocate(n)
        for page in pages or ():
            self.slots[page] = [0] * PAGE_TOKENS
        return pages

    def label(self, page: int, key: bytes) -> None:
        assert all(self.slots[page]), "a page can be found before it is complete"
        super().label(page, key)


@dataclass
class Life:
    """A request as the fake base sees it."""

    request: Request
    marks: list[int] = field(default_factory=list)

    def mark(self, position: int) -> int:
        for at in range(len(self.marks), position + 1):
            before = self.marks[-1] if self.marks else crc32(str(self.request.adapter).encode())
            self.marks.append(hash((before, self.request.tokens[at])) | 1)
        return self.marks[position]

    def compute(self, item: Scheduled, memory: Memory, readers: list[Request]) -> None:
        """`readers`: of the same step, of pages that it writes."""
        own, start = self.request, self.request.computed
        if own.adapter is not None:
            assert own.holds_adapter and is_in_pages(own.adapter, memory.store.in_pages(own.adapter))
        if start % PAGE_TOKENS == 0 or item.tokens > 1:
            self.check(memory)
        for at in range(start, start + item.tokens):
            page = own.pages[at // PAGE_TOKENS]
            allowed = sum(page in one.pages for one in readers if one is not own)
            assert memory.pool.references(page) == 1 + allowed, "a page is written that others read"
            memory.slots[page][at % PAGE_TOKENS] = self.mark(at)
        own.computed += item.tokens
        if memory.state_pages:
            self.advance(memory, start)

    def advance(self, memory: Memory, start: int) -> None:
        """Compute the recurrent state of the tokens from `start` on."""
        own = self.request
        if own.restored:
            copied = [memory.slots[page] for page in own.restored]
            assert copied == self.snapshot(start, memory), "a snapshot is another's, or was overwritten"
            memory.states[own.slot] = self.mark(start - 1)
        assert not start or memory.states[own.slot] == self.mark(start - 1), "the state is not in its slot"
        memory.states[own.slot] = self.mark(own.computed - 1)
        if own.saved is not None:
            assert own.saved.tokens == own.computed
            for page, marks in zip(own.saved.pages, self.snapshot(own.computed, memory), strict=True):
                assert memory.pool.references(page) == 1
                memory.slots[page] = marks

    def snapshot(self, tokens: int, memory: Memory) -> list[list[int]]:
        return [[self.mark(tokens - 1) ^ number << 8] * PAGE_TOKENS for number in range(memory.state_pages)]

    def check(self, memory: Memory) -> None:
        """The pages hold what this sequence would have written itself."""
        own = self.request
        for at in range(own.computed):
            assert memory.slots[own.pages[at // PAGE_TOKENS]][at % PAGE_TOKENS] == self.mark(at), own.id


def make(number: int, chance: random.Random, roots: list[list[int]], memory: Memory) -> Life:
    tokens = chance.choice(roots)[: chance.randint(0, 60)] + [
        chance.randrange(50) for _ in range(chance.randint(1, 12))
    ]
    max_tokens = chance.randint(1, 24)
    adapter = chance.choice([None, REFS[0], REFS[1], *chance.choices(REFS, range(len(REFS), 0, -1))])
    if adapter is not None:
        memory.store.acquire(adapter)
    if chance.random() < 0.01:  # it fits the pool, alone with its adapter and to the last slot
        room = memory.pool.total - (0 if adapter is None else memory.store.pages(adapter))
        max_tokens = room * PAGE_TOKENS + 1 - len(tokens)
    scored = 1 if chance.random() < 0.05 else None
    message = Generate(
        id=str(number),
        prompt=tuple(tokens),
        sampling=SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored),
        adapter=adapter,
        slo=Slo(ttft=1, tpot=1),
    )
    keys = PageKeys(PAGE_TOKENS, base="b", adapter=adapter)
    stop_ids = frozenset(range(chance.choice((0, 5))))  # half of them end nobody knows when
    return Life(Request(message, stop_ids=stop_ids, keys=keys))


class Traffic:
    """Requests over one memory: who lives, and how many came, ended and were cancelled."""

    def __init__(
        self, memory: Memory, seed: int, *, running: int, step_tokens: int, lengths: OutputLengths | None = None
    ) -> None:
        self.memory, self.chance = memory, random.Random(seed)
        states = StateSlots(RUNNING) if memory.state_pages else None
        self.scheduler = Scheduler(
            memory, memory.store, max_running=running, step_tokens=step_tokens, lengths=lengths, states=states
        )
        self.roots = [[self.chance.randrange(50) for _ in range(60)] for _ in range(2)]
        self.live: dict[str, Life] = {}
        self.made = self.ended = self.cancelled = 0

    def arrive(self) -> None:
        life = make(self.made, self.chance, self.roots, self.memory)
        self.live[life.request.id] = life
        self.scheduler.add(life.request)
        self.made += 1

    def remove(self, id: str) -> None:
        own = self.live.pop(id).request
        self.scheduler.remove(own)
        assert not own.pages
        assert not own.holds_adapter
        if own.adapter is not None:
            self.memory.store.release(own.adapter)

    def cancel(self) -> None:
        self.remove(self.chance.choice(list(self.live)))
        self.cancelled += 1

    def run(self, scheduled: list[Scheduled]) -> None:
        readers = [item.request for item in scheduled if self.scheduler.active.reads_unwritten(item.request)]
        for item in scheduled:
            own, life = item.request, self.live[item.request.id]
            life.compute(item, self.memory, readers)
            if own.pending == 0 and own.push(life.mark(own.computed - 1) // 2 % 50) is not None:
                assert own.generated == own.sampling.max_tokens or own.tokens[-1] in own.stop_ids
                life.check(self.memory)
                self.remove(own.id)
                self.ended += 1
        self.scheduler.changed()

    @property
    def waiting(self) -> list[Request]:
        """In line, first come first."""
        found = [life.request for life in self.live.values() if not life.request.pages]
        return sorted(found, key=lambda request: request.number)

    def promised(self, *others: Request) -> int:
        """Most pages that the active sequences and `others` may need beyond those that they hold."""
        active = [life.request for life in self.live.values() if life.request.pages]
        return sum(
            self.memory.pages_for(len(own.message.prompt) + own.max_tokens - 1) - len(own.pages)
            for own in (*active, *others)
        )


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "state_pages", "hits"), [(PAGES, 0, 1 / 8), (128, 3, 1 / 50)])
def test_thousands_of_requests_with_cancels_leave_no_page_behind(pages: int, state_pages: int, hits: float) -> None:
    """`hits`: least part of the tokens that is found."""
    memory = Memory(pages, state_pages)
    traffic = Traffic(memory, 0, running=RUNNING, step_tokens=STEP_TOKENS, lengths=OneMoreToken())
    chance, scheduler, steps = traffic.chance, traffic.scheduler, 0
    while traffic.made < 3_000 or traffic.live:
        for _ in range(chance.choice((0, 0, 1, 4)) if traffic.made < 3_000 and len(traffic.live) < 60 else 0):
            traffic.arrive()
        if traffic.live and chance.random() < 0.1:
            traffic.cancel()
        before = scheduler.preemptions
        scheduled = next_scheduled(scheduler)
        steps += 1
        assert bool(scheduled) == bool(traffic.live), "nobody moves"
        check_nobody_waits_in_vain(traffic, scheduled, preempted=scheduler.preemptions > before)
        traffic.run(scheduled)
        if steps % 100 == 0:
            memory.pool.check_integrity()
    assert traffic.ended + traffic.cancelled == traffic.made
    assert (len(scheduler), memory.pool.used, memory.pool.free_pages) == (0, 0, pages)
    memory.pool.check_integrity()
    assert memory.pool.cached > pages // 2
    assert scheduler.preemptions > 30
    asked = scheduler.active.prefix_queries
    assert asked > scheduler.active.prefix_hits > hits * asked
    assert traffic.cancelled > 150
    assert memory.store.entered > 1500
    assert memory.store.moved > 300, "pages were in adapters' ways"


def check_nobody_waits_in_vain(traffic: Traffic, scheduled: list[Scheduled], *, preempted: bool) -> None:
    """Whoever is not let in lacks pages, and no idle page could have served; or other adapters are in its adapter's
    way."""
    waiting, memory = traffic.waiting, traffic.memory
    room = len(traffic.live) - len(waiting) < RUNNING and sum(item.tokens for item in scheduled) < STEP_TOKENS
    if waiting and room and not preempted:
        first, ref = waiting[0], waiting[0].adapter
        need = memory.pages_for(len(first.tokens)) + (0 if ref is None else memory.store.needs(ref))
        need += memory.state_pages
        blocked = ref is not None and not memory.pool.fits_span(memory.store.pages(ref))
        assert memory.pool.free_pages < need or blocked


@pytest.mark.slow
def test_nothing_waits_before_95_percent_of_the_pool_are_used_or_promised_and_hardly_anything_gives_way() -> None:
    """With adapters and tokens of a hundred sequences mixed, which come, grow and go."""
    pages = 1000
    memory = Memory(pages)
    traffic = Traffic(memory, 0, running=10_000, step_tokens=10_000)
    least, waited, gave_way = 1.0, 0, 0
    for _ in range(120):
        for _ in range(traffic.chance.randint(0, 25) if len(traffic.live) < 400 else 0):
            traffic.arrive()
        if traffic.live and traffic.chance.random() < 0.2:
            traffic.cancel()
        before, asked = traffic.scheduler.preemptions, memory.pool.used
        scheduled = next_scheduled(traffic.scheduler)
        if traffic.scheduler.preemptions > before:
            gave_way += 1
            least = min(least, asked / pages)
        elif traffic.waiting:
            waited += 1
            least = min(least, (memory.pool.used + traffic.promised(traffic.waiting[0])) / pages)
        traffic.run(scheduled)
        memory.pool.check_integrity()
    assert waited > 20
    assert gave_way <= 2
    assert least >= 0.95
