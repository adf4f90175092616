"""Which tokens the next step computes, and who holds pages for them. Pure bookkeeping: no tensors.

Iteration-level batching (Orca, OSDI '22 §3.1) with chunked prefill (Sarathi-Serve, OSDI '24 §4.2) and preemption by
recomputation (vLLM, SOSP '23 §4.5), of what other sequences' pages do not hold.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coserve.adapter_store.pages import Activated
from coserve.generate.output_lengths import Growing, OutputLengths, fits
from coserve.generate.sequence_state import SequenceState
from coserve.generate.step_budget import StepBudget
from coserve.types import AdapterRef

log = logging.getLogger(__name__)

PREEMPTED = (
    "preemptions so far: %d (a request gives its pages of the KV cache up to an earlier one, and is computed again later); more "
    "--kv-tokens or less --max-running make them rarer"
)


class PageSource(Protocol):
    """What the scheduler needs of `memory.KvCache`."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def free_pages(self) -> int: ...
    def allocate(self, n: int) -> list[int] | None: ...
    def free(self, pages: Sequence[int]) -> None: ...
    def label(self, page: int, key: bytes) -> None: ...
    def unlabel(self, page: int) -> None: ...
    def find(self, keys: Iterable[bytes]) -> list[int]: ...
    def pages_for(self, tokens: int) -> int: ...


class AdapterSource(Protocol):
    """What the scheduler needs of `AdapterStore`, which loads adapters into pages of the same pool."""

    def failure(self, ref: AdapterRef) -> Exception | None: ...
    def reading(self, ref: AdapterRef) -> bool: ...
    def needs(self, ref: AdapterRef) -> int: ...
    def to_copy(self, ref: AdapterRef) -> int: ...
    def activate(self, ref: AdapterRef) -> Activated | None: ...
    def deactivate(self, ref: AdapterRef) -> None: ...


SCORED_TOKENS = 512
"""Most tokens of a step that belong to prompts which are scored: logits are kept for each of them, not for the last only."""


LOADED_BYTES = 256 << 20
"""Bytes of adapters that a step copies into pages, from which on no further adapter is loaded in it: some milliseconds, for
which the sequences that run wait."""

FEW = 8
"""Sequences that may wait for pages here while there are too few pages. Others wait where they are ordered by deadlines."""


@dataclass(frozen=True)
class Share:
    """The next `tokens` tokens of a sequence, computed in one step."""

    sequence: SequenceState
    tokens: int


class Scheduler:
    """First come, first served. A sequence is waiting (no pages) or active (it holds pages, and its adapter is in some).

    A sequence becomes active when the pool has pages for its adapter, for all its tokens so far, and for those that all
    active ones are expected to need later (`OutputLengths`). It takes them one at a time, and when there is none the latest
    arrival gives up its pages and waits again, ahead of those that came after it. The earliest is never made to wait for
    pages, every sequence fits the pool alone with its adapter, and whoever is first in line lets nobody pass: so all of
    them end. Only active sequences hold adapters in pages; when none is active all pages are free, and then no adapter is
    in another's way.

    A page whose tokens are all computed can be found by later sequences that begin alike, also after its own sequence
    ended or gave way. Pages that nobody holds are as good as free: no sequence waits for them.
    """

    def __init__(
        self,
        pages: PageSource,
        adapters: AdapterSource,
        *,
        max_running: int,
        step_tokens: int,
        scored_tokens: int = SCORED_TOKENS,
        loaded_bytes: int = LOADED_BYTES,
        lengths: OutputLengths | None = None,
    ) -> None:
        """`scored_tokens`: most tokens of a step that belong to prompts which are scored; `loaded_bytes`: of adapters, from
        which on a step loads no further one; `lengths`: what is known of answers that ended."""
        # No more than a step holds: then every decode is in every step, and a prompt under way always moves.
        self._pages, self._max_running = pages, min(max_running, step_tokens)
        self.budget = StepBudget(step_tokens)
        self._adapters, self._scored_tokens = adapters, scored_tokens
        self._loaded_bytes = loaded_bytes
        self._waiting: list[SequenceState] = []
        self._active: list[SequenceState] = []
        self._lengths = OutputLengths() if lengths is None else lengths
        self._outgrown = False
        """The first in line was found to need too many pages beside the active ones, and none of those has ended since."""
        self._lacks_pages = False
        """The last sequence that could have become active found too few pages."""
        self._few = self._max_running
        """Sequences that may wait: `FEW` while there are too few pages, twice as many after each plan that finds enough for all."""
        self.failed: list[tuple[SequenceState, Exception]] = []
        """Sequences whose adapters cannot be loaded any more, and why; the caller removes both."""
        self.started: list[SequenceState] = []
        """Sequences that `plan` made active for the first time; the caller removes them."""
        self._loaded = 0
        """Bytes of adapters that were loaded for the step being planned."""
        self.preemptions = 0
        self.prefix_queries = 0
        """Tokens of the sequences that looked for pages of others, each counted when it first became active."""
        self.prefix_hits = 0
        """Tokens of them that were found."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    @property
    def room(self) -> int:
        """How many more sequences may be added so that few wait for pages."""
        return max(0, self._few - len(self._waiting))

    def add(self, sequence: SequenceState) -> None:
        """Put a sequence in line. Its tokens up to `max_tokens` and its adapter must fit the pool."""
        insort(self._waiting, sequence, key=_arrival)

    def remove(self, sequence: SequenceState) -> None:
        """Forget a sequence and free its pages."""
        (self._active if sequence in self._active else self._waiting).remove(sequence)
        self._release(sequence)
        self._outgrown = False
        if sequence.generated:
            self._lengths.ended(sequence.generated, cut=sequence.generated >= sequence.max_tokens)

    def disown(self, sequence: SequenceState) -> None:
        """Remove the sequence's pages from the prefix cache."""
        for page in sequence.pages:
            self._pages.unlabel(page)
        sequence.keys = None

    def plan(self) -> list[Share]:
        """At most `budget` tokens, one share a sequence: decodes, then prompts under way, then new ones.

        The pages for all shares are taken. Of prompts that are scored at most `scored_tokens` are in it. Where the budget
        has less than a token for each active sequence, the latest ones give way.
        """
        while len(self._active) > self.budget.tokens:
            self._preempt(self._active[-1])
        for sequence in self._active:
            self._label(sequence)
        self._loaded = 0
        before = self.preemptions
        shares = [Share(s, 1) for s in tuple(self._active) if s.pending == 1 and self._grow(s, before)]
        budget = self.budget.tokens - len(shares)
        scored = min(budget, self._scored_tokens)
        for sequence in self._active:
            budget_left = min(budget, scored) if sequence.scores_prompt else budget
            if budget_left and sequence.pending > 1:
                shares.append(Share(sequence, min(budget_left, sequence.pending)))
                budget -= shares[-1].tokens
                scored -= shares[-1].tokens if sequence.scores_prompt else 0
        while budget and self._waiting and self.preemptions == before:
            budget_left = min(budget, scored) if self._waiting[0].scores_prompt else budget
            admitted = self._admit() if budget_left else None
            if admitted is None:
                break
            shares.append(Share(admitted, min(budget_left, admitted.pending)))
            budget -= shares[-1].tokens
            scored -= shares[-1].tokens if admitted.scores_prompt else 0
        if self._waiting and self._lacks_pages:
            self._few = FEW
        elif not self._waiting:
            self._few = min(2 * self._few, self._max_running)
        return shares

    @property
    def blocked(self) -> bool:
        """No sequence is active, and the first in line cannot become so before its adapter's files have been read."""
        if self._active or not self._waiting:
            return False
        ref = self._waiting[0].adapter
        return ref is not None and self._adapters.reading(ref)

    def _grow(self, sequence: SequenceState, before: int) -> bool:
        """A page for the next token if it needs one; False when the sequence had to give up its own, now or since there
        were `before` preemptions."""
        if self.preemptions != before and sequence not in self._active:
            return False
        need = self._pages.pages_for(sequence.length) - len(sequence.pages)
        if not need:
            return True
        while (pages := self._pages.allocate(need)) is None:
            victim = self._active[-1]
            assert victim is not sequence or len(self._active) > 1, "a sequence alone does not fit the pool"
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.pages.extend(pages)
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        self._active.remove(sequence)
        self._release(sequence)
        self.add(sequence)
        self.preemptions += 1
        self._lacks_pages = True
        if str(self.preemptions).rstrip("0") == "1":
            log.warning(PREEMPTED, self.preemptions)

    def _admit(self) -> SequenceState | None:
        """Make the first in line active, if there is a place for it and all its tokens find pages, also later."""
        if self._outgrown or len(self._active) >= min(self._max_running, self.budget.tokens):
            return None
        sequence = self._waiting[0]
        found = self._find(sequence)
        others = self._pages.pages_for(len(sequence.tokens)) - len(found)
        if not self._activate(sequence, found, others):
            self._pages.free(found)
            return None
        pages = self._pages.allocate(others)
        assert pages is not None, "fewer pages are free than were counted"
        self._waiting.pop(0)
        sequence.pages = found + pages
        sequence.labelled = sequence.shared = len(found)
        sequence.computed = len(found) * self._pages.page_tokens
        if sequence.keys is not None and not (sequence.scores_prompt or sequence.admitted):
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += sequence.computed
        if not sequence.admitted:
            sequence.admitted = True
            self.started.append(sequence)
        insort(self._active, sequence, key=_arrival)
        return sequence

    def _activate(self, sequence: SequenceState, found: list[int], others: int) -> bool:
        """Load the sequence's adapter if `others` pages are free beside it; False if not. The pages in `found` may move."""
        ref = sequence.adapter
        if ref is not None and (error := self._adapters.failure(ref)) is not None:
            self.failed.append((sequence, error))
            return False
        # Counted first: an adapter that was loaded for nothing would have evicted others, at every step again.
        if self._loaded >= self._loaded_bytes and ref is not None and self._adapters.to_copy(ref):
            return False
        free = self._pages.free_pages - others - (0 if ref is None else self._adapters.needs(ref))
        self._outgrown = free >= 0 and bool(self._active) and not self._can_grow(sequence, others, free)
        self._lacks_pages = free < 0 or self._outgrown
        if self._lacks_pages:
            return False
        if ref is None:
            return True
        self._loaded += self._adapters.to_copy(ref)
        # What this raises is not contained: pages may have moved, and no sequence was told.
        activated = self._adapters.activate(ref)
        if activated is None:
            return False
        sequence.weights = activated.weights
        if activated.moved:
            for pages in (found, *(other.pages for other in self._active)):
                pages[:] = [activated.moved.get(page, page) for page in pages]
        return True

    def _can_grow(self, sequence: SequenceState, others: int, free: int) -> bool:
        """`free` pages, beside `others` that the first in line takes now, are enough for what it and the active ones are expected
        to need."""
        self._lengths.under_way([own.generated for own in self._active])
        growing = [
            Growing(own.length, self._growth(own), len(own.pages) - own.shared, bool(own.stop_ids))
            for own in self._active
        ]
        growing.append(Growing(sequence.length, self._growth(sequence), others, bool(sequence.stop_ids)))
        return fits(growing, free, self._pages.page_tokens)

    def _growth(self, sequence: SequenceState) -> int:
        """Tokens that it is expected to compute beyond those that it has pages for. Its last one is not computed."""
        prompt = len(sequence.request.prompt)
        reached = max(sequence.length - prompt, sequence.sampling.min_tokens - 1)
        output = self._lengths.expected(sequence.number, reached, sequence.max_tokens, stops=bool(sequence.stop_ids))
        return max(0, prompt + output - 1 - sequence.length)

    def _find(self, sequence: SequenceState) -> list[int]:
        """Pages that hold its first tokens; never the last token, which must be computed for what comes next."""
        if sequence.keys is None or sequence.scores_prompt:
            return []
        full = (len(sequence.tokens) - 1) // self._pages.page_tokens
        return self._pages.find(sequence.keys.first(full, sequence.tokens))

    def _label(self, sequence: SequenceState) -> None:
        """Let others find the pages that are full by now."""
        full = min(sequence.computed, len(sequence.tokens)) // self._pages.page_tokens
        if sequence.keys is None or full <= sequence.labelled:
            return
        keys = sequence.keys.first(full, sequence.tokens)
        for page in range(sequence.labelled, full):
            self._pages.label(sequence.pages[page], keys[page])
        sequence.labelled = full

    def _release(self, sequence: SequenceState) -> None:
        self._label(sequence)
        self._pages.free(sequence.pages)
        if sequence.adapter is not None and sequence.weights is not None:
            self._adapters.deactivate(sequence.adapter)
        sequence.weights = None
        sequence.pages = []
        sequence.computed = sequence.labelled = 0


def _arrival(sequence: SequenceState) -> int:
    return sequence.number
