"""Ten thousand requests with cancels over the real scheduler, pool and prefix cache, and a base that is a function.

Each slot of a page holds a mark of everything that its keys and values would depend on, so that a page in the wrong hands
shows at once; and each token is a function of the marks before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from zlib import crc32

import pytest

from coserve.generate.schedule import Scheduler, Share
from coserve.generate.sequences import Sequence
from coserve.link import Generate
from coserve.memory.pages import PagePool
from coserve.memory.prefix import PageKeys
from coserve.types import AdapterRef, SamplingParams, Slo

PAGES, PAGE_TOKENS, STEP_TOKENS, RUNNING = 64, 4, 48, 12
ROOM = PAGES * PAGE_TOKENS


class Memory:
    def __init__(self) -> None:
        self.pool, self.page_tokens = PagePool(PAGES), PAGE_TOKENS
        self.slots = [[0] * PAGE_TOKENS for _ in range(PAGES)]

    def take(self, n: int) -> list[int] | None:
        pages = self.pool.take(n)
        for page in pages or ():
            self.slots[page] = [0] * PAGE_TOKENS
        return pages

    def give(self, pages: list[int]) -> None:
        self.pool.give(pages)

    def label(self, page: int, key: bytes) -> None:
        assert all(self.slots[page]), "a page can be found before it is complete"
        self.pool.label(page, key)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        return self.pool.find(keys)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // PAGE_TOKENS)


@dataclass
class Life:
    """A request as the fake base sees it."""

    sequence: Sequence
    marks: list[int] = field(default_factory=list)

    def mark(self, position: int) -> int:
        for at in range(len(self.marks), position + 1):
            before = self.marks[-1] if self.marks else crc32(str(self.sequence.adapter).encode())
            self.marks.append(hash((before, self.sequence.tokens[at])) | 1)
        return self.marks[position]

    def compute(self, share: Share, memory: Memory) -> None:
        own, start = self.sequence, self.sequence.computed
        if start % PAGE_TOKENS == 0 or share.tokens > 1:
            self.check(memory)
        for at in range(start, start + share.tokens):
            page = own.pages[at // PAGE_TOKENS]
            assert memory.pool._holders[page] == 1, "a page is written that others read"
            memory.slots[page][at % PAGE_TOKENS] = self.mark(at)
        own.computed += share.tokens

    def check(self, memory: Memory) -> None:
        """The pages hold what this sequence would have written itself."""
        own = self.sequence
        for at in range(own.computed):
            assert memory.slots[own.pages[at // PAGE_TOKENS]][at % PAGE_TOKENS] == self.mark(at), own.id


def make(number: int, chance: random.Random, roots: list[list[int]]) -> Life:
    tokens = chance.choice(roots)[: chance.randint(0, 60)] + [
        chance.randrange(50) for _ in range(chance.randint(1, 12))
    ]
    max_tokens = chance.randint(1, 24)
    if chance.random() < 0.01:
        max_tokens = ROOM + 1 - len(tokens)  # it fits the pool, alone and to the last slot
    adapter = chance.choice([None, AdapterRef("a", 1), AdapterRef("a", 2), AdapterRef("b", 1)])
    scored = 1 if chance.random() < 0.05 else None
    request = Generate(
        id=str(number),
        prompt=tuple(tokens),
        sampling=SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored),
        adapter=adapter,
        slo=Slo(ttft=1, tpot=1),
    )
    keys = PageKeys(PAGE_TOKENS, base="b", adapter=adapter)
    return Life(Sequence(request, number, None, max_tokens, frozenset(), tokens, keys=keys))


@pytest.mark.parametrize("seed", [0])
def test_ten_thousand_requests_with_cancels_leave_no_page_behind(seed: int) -> None:
    chance, memory = random.Random(seed), Memory()
    roots = [[chance.randrange(50) for _ in range(60)] for _ in range(2)]
    scheduler = Scheduler(memory, max_running=RUNNING, step_tokens=STEP_TOKENS)
    live: dict[str, Life] = {}
    made = ended = cancelled = steps = 0
    while made < 10_000 or live:
        for _ in range(chance.choice((0, 0, 1, 4)) if made < 10_000 and len(live) < 60 else 0):
            life = make(made, chance, roots)
            live[life.sequence.id] = life
            scheduler.add(life.sequence)
            made += 1
        if live and chance.random() < 0.1:
            life = live.pop(chance.choice(list(live)))
            scheduler.remove(life.sequence)
            assert life.sequence.pages == []
            cancelled += 1
        before = scheduler.preemptions
        shares = scheduler.plan()
        steps += 1
        assert bool(shares) == bool(live), "nobody moves"
        check_nobody_waits_in_vain(live, shares, memory, preempted=scheduler.preemptions > before)
        for share in shares:
            own, life = share.sequence, live[share.sequence.id]
            life.compute(share, memory)
            if own.pending == 0:
                finished = own.push(life.mark(own.computed - 1) // 2 % 50)
                if finished is not None:
                    assert own.generated == own.sampling.max_tokens
                    life.check(memory)
                    scheduler.remove(own)
                    del live[own.id]
                    ended += 1
        if steps % 100 == 0:
            memory.pool.check_integrity()
    assert ended + cancelled == made
    assert (len(scheduler), memory.pool.used, memory.pool.free) == (0, 0, PAGES)
    memory.pool.check_integrity()
    assert memory.pool.idle > PAGES // 2
    assert scheduler.preemptions > 100
    assert scheduler.prefix_queries > scheduler.prefix_hits > scheduler.prefix_queries // 5
    assert cancelled > 500


def check_nobody_waits_in_vain(live: dict[str, Life], shares: list[Share], memory: Memory, *, preempted: bool) -> None:
    """Whoever is not let in lacks pages, and no idle page could have served."""
    waiting = [life.sequence for life in live.values() if not life.sequence.pages]
    active = len(live) - len(waiting)
    room = active < RUNNING and sum(share.tokens for share in shares) < STEP_TOKENS
    if waiting and room and not preempted:
        first = min(waiting, key=lambda sequence: sequence.arrival)
        assert memory.pool.free < memory.pages_for(len(first.tokens))
