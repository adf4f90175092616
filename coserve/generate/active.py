"""The requests that hold pages, and what they hold: pages, copies of their adapters in pages, recurrent states."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile

from coserve.generate.kept_prefixes import KeptPrefixes
from coserve.generate.line import number_of
from coserve.generate.output_lengths import Growing, OutputLengths, fits
from coserve.generate.plan import Scheduled
from coserve.generate.snapshots import Snapshots
from coserve.generate.sources import AdapterSource, PageSource
from coserve.memory.state_pool import StateSlots
from coserve.queues.request import Request

LOADED_BYTES = 256 << 20
"""Once a step has copied this many bytes of adapters into pages, it loads no further one: running sequences wait for
the copies, some milliseconds."""


class ActiveRequests:
    """Requests with pages, in order of entry into the batch. Only they pin adapters in pages; without any, all pages
    are free but those of kept prefixes.

    A full page whose tokens are computed goes into the prefix cache, also after its request ended or was preempted.
    Cached pages that no request holds count as free. A request that becomes active also shares pages that prompts of
    the same step will write: attention writes all keys and values of a step's prompts before it reads any. If the base
    has recurrent states, it shares no such pages, and only those of a prefix that has a snapshot of the state.
    """

    def __init__(
        self,
        pages: PageSource,
        adapters: AdapterSource,
        states: StateSlots | None,
        *,
        lengths: OutputLengths,
        loaded_bytes: int,
        failed: Callable[[Request, Exception], None],
        precede: Callable[[Request, int], None],
    ) -> None:
        self._lengths, self._loaded_bytes = lengths, loaded_bytes
        self._pages, self._adapters, self._states = pages, adapters, states
        self._snapshots = Snapshots(pages)
        self._failed, self._precede = failed, precede
        self._kept = KeptPrefixes(pages, adapters)
        self._requests: list[Request] = []
        self._outgrown: set[int] = set()
        """Numbers of the waiting requests that were expected to outgrow the pool together with the active ones. Cleared
        when a request of the batch ends."""
        self._growing: list[Growing] | None = None
        """The requests and what they are predicted to need, for all that may become active in one step; None: not
        predicted since the step began, or since one has left."""
        self.lacks_pages = False
        """Whether the last request that could have become active found too few pages."""
        self._loaded = 0
        """Bytes of adapters loaded for the step being committed."""
        self._written: dict[bytes, tuple[Request, int]] = {}
        """Pages that prompts of this step write, by prefix-cache key: the writing request, and the index in its
        `pages`."""
        self._readers: set[int] = set()
        """Numbers of the requests that share pages of `_written`."""
        self.prefix_queries = 0
        """Tokens of the requests that looked up the prefix cache, each counted when it first became active."""
        self.prefix_hits = 0
        """Tokens of `prefix_queries` that were found."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def latest(self) -> Request:
        """The request that entered the batch last."""
        return self._requests[-1]

    def first(self, count: int) -> list[Request]:
        """The first `count` requests."""
        return self._requests[:count]

    def begin_step(self) -> None:
        """Publish the computed pages, and allow the loading of adapters again."""
        self._loaded, self._growing = 0, None
        self._written.clear()
        self._readers.clear()
        self._kept.forget_unpinned()
        for request in self._requests:
            self._label(request)
            if self._states is not None:
                self._snapshots.settle(request)

    def writes(self, item: Scheduled) -> None:
        """Record that the step computes `item`: requests that become active after it share the pages that it fills.
        Pages of scored prompts, which may run in a separate forward, and pages that a decode fills are not shared: they
        are written too late in the step to be read in it."""
        request = item.request
        if request.keys is None or request.scores_prompt or item.tokens == 1 or self._states is not None:
            return
        full = (request.computed + item.tokens) // self._pages.page_tokens
        keys = request.keys.first(full, request.tokens)
        for page in range(request.labelled, full):
            self._written.setdefault(keys[page], (request, page))

    def keeps_states(self, scheduled: Iterable[Scheduled]) -> None:
        """Take pages for the snapshots of recurrent states that a step leaves, after all others."""
        if self._states is not None:
            self._snapshots.take_pages(scheduled)

    def reads_unwritten(self, request: Request) -> bool:
        """Whether the request shares pages that the last committed step still has to write."""
        return request.number in self._readers

    def grow(self, request: Request) -> bool:
        """Allocate a page for the next token if needed; False if none is free."""
        need = self._pages.pages_for(len(request.tokens) + request.in_flight) - len(request.pages)
        if not need:
            return True
        if len(self) == 1 and need > self._pages.free_pages:
            self._kept.forget_all()
        if (pages := self._pages.allocate(need)) is None:
            return False
        request.pages = (*request.pages, *pages)
        return True

    def enter(self, request: Request) -> bool:
        """Activate the request if there are enough pages, its expected growth included; return whether."""
        if request.number in self._outgrown:
            return False
        found, restored = self._find(request), list[int]()
        if (cached := len(found)) and self._states is not None:
            restored = self._snapshots.find(request, found)
        found += (unwritten := self._find_unwritten(request, len(found)))
        others = self._pages.pages_for(len(request.tokens)) - len(found)
        if restored and not self._requests and self._free_after(request, others) < 0:
            self._pages.free(restored)  # the snapshot takes pages that the request needs
            self._pages.free(found)
            found, restored, others = [], [], others + len(found)
        activated = self._activate(request, found, restored, others)
        pages = self._pages.allocate(others) if activated else None
        if pages is None:  # its adapter takes more than was counted if LoRA servers were lost since
            assert request.holds_adapter or not activated, "fewer pages are free than were counted"
            self._deactivate(request)
            self._pages.free(found)
            self._pages.free(restored)
            return False
        request.pages = (*found, *pages)
        if self._states is not None:
            slot = self._states.allocate()
            assert slot is not None, "expected a slot for each active request"
            request.slot, request.restored = slot, restored
        request.labelled = request.shared = len(found)
        request.computed = len(found) * self._pages.page_tokens
        if self._states is not None:
            request.snapshots_at = self._snapshots.choose(request, cached)
        if request.keys is not None and not (request.scores_prompt or request.started):
            self.prefix_queries += len(request.tokens)
            self.prefix_hits += request.computed
            request.cached = max(0, request.computed - request.prefix)
        if request.prefix > request.computed:
            self._precede(request, request.computed)
            request.computed = request.prefix
            self._label(request)
        self._kept.keep(request)
        if unwritten:
            self._readers.add(request.number)
        insort(self._requests, request, key=number_of)
        if self._growing is not None:
            self._growing.append(self._lengths.growing(request, others))
        return True

    def leave(self, request: Request) -> None:
        """Free what the request holds."""
        self._requests.remove(request)
        self._growing = None
        self._label(request)
        self._kept.keep(request)
        if self._states is not None:
            self._snapshots.leave(request)
        self._pages.free(request.pages)
        self._deactivate(request)
        if self._states is not None:
            self._states.free(request.slot)
            request.slot = -1
        request.pages = ()
        request.computed = request.labelled = 0

    def one_ended(self) -> None:
        """Note that a request of the batch has ended: requests that were expected to outgrow the pool are tried
        again."""
        self._outgrown.clear()

    def disown(self, request: Request) -> None:
        """Remove the request's pages, and its snapshots, from the prefix cache."""
        if request.adapter is not None:
            self._kept.forget(request.adapter)
        if self._states is not None:
            self._snapshots.forget(request)
        for page in request.pages:
            self._pages.unlabel(page)
        request.keys = None

    def _activate(self, request: Request, found: list[int], restored: list[int], others: int) -> bool:
        """Load the request's adapter if there is room for it and for `others` further pages; return whether. The pages
        in `found` and `restored` may be renumbered."""
        ref = request.paged_adapter
        if ref is not None and (error := self._adapters.failure(ref)) is not None:
            self._failed(request, error)
            return False
        # Checked first: an adapter loaded in vain would evict others, again at every step.
        if self._loaded >= self._loaded_bytes and ref is not None and self._adapters.to_copy(ref):
            return False
        if not self._requests and self._free_after(request, others) < 0:
            self._kept.forget_all()
        free = self._free_after(request, others)
        later = free
        if self._states is not None:  # snapshots that are read are held until the next step
            later += len(set(restored).union(*(other.restored for other in self._requests)))
        if free >= 0 and self._requests:
            if self._growing is None:
                self._growing = self._lengths.all_growing(self._requests)
            growing = [*self._growing, self._lengths.growing(request, others)]
            if not fits(growing, later, self._pages.page_tokens):
                self._outgrown.add(request.number)
        self.lacks_pages = free < 0 or request.number in self._outgrown
        if self.lacks_pages:
            if ref is not None:
                self._adapters.lacks_pages(ref)
            return False
        if ref is None:
            return True
        self._loaded += self._adapters.to_copy(ref)
        # An error here is not contained: pages may have moved without the requests' page tables being updated.
        activated = self._adapters.activate(ref)
        if activated is None:
            return False
        request.holds_adapter = True
        if activated.moved:
            moved = activated.moved
            for other in self._requests:
                other.pages = tuple([moved.get(page, page) for page in other.pages])
            for pages in (found, restored, *[other.restored for other in self._requests], *self._kept):
                pages[:] = [moved.get(page, page) for page in pages]
        return True

    def _deactivate(self, request: Request) -> None:
        if request.adapter is not None and request.holds_adapter:
            self._adapters.deactivate(request.adapter)
        request.holds_adapter = False

    def _free_after(self, request: Request, others: int) -> int:
        """Free pages once the request has `others` further pages, and its adapter is loaded; below 0: so many lack."""
        ref = request.paged_adapter
        return self._pages.free_pages - others - (0 if ref is None else self._adapters.needs(ref))

    def _find(self, request: Request) -> list[int]:
        """Find the pages of the request's KV prefix in the prefix cache and, unless its prompt is scored, those of all
        its tokens but the last."""
        keys = self._wanted(request)
        return self._pages.find(keys) if keys else []

    def _find_unwritten(self, request: Request, found: int) -> list[int]:
        """Find the pages after the first `found` among those that this step writes."""
        if not self._written:
            return []
        keys = takewhile(self._written.__contains__, self._wanted(request)[found:])
        pages = [owner.pages[page] for owner, page in map(self._written.__getitem__, keys)]
        if pages:
            self._pages.hold(pages)
        return pages

    def _wanted(self, request: Request) -> Sequence[bytes]:
        """Return the keys of the pages that the request may share."""
        if request.keys is None:
            return ()
        full = (request.prefix if request.scores_prompt else len(request.tokens) - 1) // self._pages.page_tokens
        return request.keys.first(full, request.tokens)

    def _label(self, request: Request) -> None:
        """Publish the full pages in the prefix cache."""
        full = min(request.computed, len(request.tokens)) // self._pages.page_tokens
        if request.keys is None or full <= request.labelled:
            return
        keys = request.keys.first(full, request.tokens)
        for page in range(request.labelled, full):
            self._pages.label(request.pages[page], keys[page])
        request.labelled = full
