"""The scheduler: the life of every request, the plan of the next step, and the allocation of pages. No tensors.

Iteration-level batching (Orca, OSDI '22 §3.1) with chunked prefill (Sarathi-Serve, OSDI '24 §4.2) and preemption by
recomputation (vLLM, SOSP '23 §4.5), except for tokens found in the prefix cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from sys import maxsize

from coserve.core.errors import InvalidRequest
from coserve.core.grammar import Grammar
from coserve.core.link.generation import RequestFailed, Tokens
from coserve.generate.active import LOADED_BYTES, ActiveRequests
from coserve.generate.line import Line
from coserve.generate.output_lengths import OutputLengths
from coserve.generate.plan import BudgetLeft, Plan, Scheduled, StepBudget, step_shape
from coserve.generate.sources import AdapterSource, PageSource
from coserve.memory.state_pool import StateSlots
from coserve.queues.deadlines import Deadlines
from coserve.queues.inference import InferenceQueue
from coserve.queues.request import Request, State

log = logging.getLogger(__name__)

PREEMPTED = """preemptions so far: %d (a request gives its pages of the KV cache up to an earlier one, and is computed \
again later); more --kv-tokens or less --max-running make them rarer"""

SCORED_TOKENS = 512
"""Most tokens of a step in prompts that are scored: each of them keeps its logits, not only the last."""

KEPT_FREE = 1 / 8
"""Most places of the batch that the batch class leaves to interactive requests, as a fraction."""

FEW = 8
"""Most requests of the batch that wait for pages while pages are short. Others stay in the queue, where fairness
applies."""


class Scheduler:
    """Requests wait in the queue, then for their adapters to be read, then for pages. Active requests hold pages, and
    so do their adapters.

    `propose` says what the next step would compute, and changes nothing; `commit` takes the pages for it.

    Requests get pages in order of entry into the batch. A request becomes active when the pool has pages for its
    adapter, for all its tokens so far, and for what all active requests are expected to need later (`OutputLengths`).
    Afterwards it takes pages one at a time. When the pool is empty, the latest active request is preempted and waits
    for pages again, ahead of later requests. A request whose adapter is in no page may be passed, for a bounded time:
    see `Line`. All requests end: the earliest is never preempted, every request fits the pool with its adapter, and
    after the bounded time none overtakes the first that waits for pages.
    """

    def __init__(
        self,
        pages: PageSource,
        adapters: AdapterSource,
        *,
        max_running: int,
        step_tokens: int,
        max_queue: int = maxsize,
        fair: bool = True,
        scored_tokens: int = SCORED_TOKENS,
        loaded_bytes: int = LOADED_BYTES,
        lengths: OutputLengths | None = None,
        compiled: Callable[[Grammar], bool] = lambda grammar: True,
        prepare: Callable[[Request], None] = lambda request: None,
        failed: Callable[[Request, Exception], None] = lambda request, error: None,
        precede: Callable[[Request, int], None] = lambda request, first: None,
        states: StateSlots | None = None,
    ) -> None:
        """`max_queue`, `fair`: see `InferenceQueue`; `scored_tokens`, `loaded_bytes`: see `SCORED_TOKENS`,
        `LOADED_BYTES`; `lengths`: lengths of past answers. `compiled` returns whether a grammar is compiled; if not, it
        starts to compile it. `prepare` is called with a request that enters the batch, its adapter in memory; an error
        that it raises ends the request. `failed` is called with each request that ends in this way, or whose adapter
        cannot be loaded. `precede` writes a request's KV prefix into its pages, from a token on. `states`: slots for
        the recurrent states of active requests; None: the base has none."""
        self.queue, self.requests = InferenceQueue(max_queue, fair=fair), dict[str, Request]()
        """`requests` holds all requests that have not ended, in any state."""
        self.budget = StepBudget(step_tokens)
        self.lengths = OutputLengths() if lengths is None else lengths
        self._adapters, self._prepare, self._failed, self._compiled = adapters, prepare, failed, compiled
        self._max_running, self._scored_tokens, self._recurrent = max_running, scored_tokens, states is not None
        # At most a step's tokens: then every decode is in every step, and a prompt under way always advances.
        self._max_active = min(max_running, step_tokens)
        self.loading: list[Request] = []
        """Requests whose adapters are being read, or whose grammars are being compiled."""
        self._line = Line(adapters)
        self.active = ActiveRequests(
            pages,
            adapters,
            states,
            lengths=self.lengths,
            loaded_bytes=loaded_bytes,
            failed=failed,
            precede=precede,
        )
        self._entered = 0
        self._plan: Plan | None = None
        """The last plan; None after a change."""
        self._few = self._max_active
        """Most requests that may wait for pages: `FEW` while pages are short, doubled by each step that leaves none
        waiting."""
        self.preemptions = self.step_adapters = 0
        """`step_adapters`: adapters of the steps so far, each counted in every step."""

    def __len__(self) -> int:
        """Requests in the batch."""
        return len(self._line) + len(self.active)

    @property
    def started(self) -> int:
        """Requests in the batch that have been computed in some step."""
        return sum(request.started for request in chain(self.active, self._line))

    @property
    def places(self) -> int:
        """Free places in the batch. While pages are short, only a few requests (`FEW`) may wait for them, not counting
        those that later ones may pass."""
        return max(0, min(self._max_running - len(self), self._few - self._line.unpassed))

    @property
    def headroom(self) -> int:
        """Free places, minus those reserved for requests whose adapters are being read."""
        return max(0, self.places - len(self.loading))

    @property
    def _batch_headroom(self) -> int:
        """How many more requests of the batch class can be admitted. They leave a place free for each interactive
        request in the batch: otherwise the next interactive one might wait until a batch-class answer ends. They leave
        no more places than they hold, so that the class always gets some, and at most `KEPT_FREE` of the batch."""
        if not self.queue.batch_waits:
            return self.headroom
        batch = sum(each.message.slo.batch for each in chain(self.active, self._line))
        return max(0, self.headroom - min(len(self) - batch, batch, int(KEPT_FREE * self._max_running)))

    # ---- a request's life

    def arrive(self, request: Request) -> Request | None:
        """Put a request into the queue: see `InferenceQueue.push`."""
        self._check_id(request)
        displaced = self.queue.push(request)
        self.requests[request.id] = request
        self._plan = None
        self._has_grammar(request)  # compiled while it is queued
        if request.adapter is not None:  # read while it is queued
            self._adapters.arrived(request.adapter, request.message.digests)
        return displaced

    def add(self, request: Request) -> None:
        """Put a request into the batch. Its adapter is in memory. Raises what `prepare` raises, and `InvalidRequest`
        for an id in use."""
        self._check_id(request)
        self._prepare(request)
        request.number, request.state = self._entered, State.ACTIVE
        self._entered += 1
        self.requests[request.id] = request
        self._stand_in_line(request)

    def _check_id(self, request: Request) -> None:
        if self.requests.get(request.id, request) is not request:
            raise InvalidRequest(f"expected a new request id, got {request.id!r}, which is running", field="id")

    def cancel_queued(self, ids: Collection[str]) -> set[str]:
        """Drop these requests as far as they are queued, and return their ids: see `InferenceQueue.cancel`."""
        gone = self.queue.cancel(ids)
        for id in gone:
            self.requests.pop(id).state = State.ENDED
        self._plan = None if gone else self._plan
        return gone

    def remove(self, request: Request) -> None:
        """Drop a request and free its pages."""
        if request.state is State.QUEUED:
            self.queue.cancel([request.id])
        elif request.state is State.LOADING:
            self.loading.remove(request)
            if request.adapter is not None and request.awaits_adapter:
                self._adapters.waited(request.adapter)
        else:
            if request.pages:
                self.active.leave(request)
            else:
                self._line.remove(request)
            self.active.one_ended()
            if request.generated:
                self.lengths.ended(request.generated, cut=request.generated >= request.max_tokens)
        request.state, self._plan = State.ENDED, None
        del self.requests[request.id]

    def changed(self) -> None:
        """Drop the cached plan: tokens of active requests were computed, or undone."""
        self._plan = None

    def tokens_came(self, messages: Sequence[Tokens | RequestFailed], now: float) -> None:
        """Record that these messages were sent: the next tokens of their requests get deadlines."""
        for message in messages:
            if (
                isinstance(message, Tokens)
                and message.tokens
                and (request := self.requests.get(message.id)) is not None
            ):
                request.token_came(now)
        self._plan = None

    def take_loaded(self) -> None:
        """Move requests whose adapters have been read, and grammars compiled, into the batch, in the order in which
        they left the queue."""
        for request, ref in [(each, each.adapter) for each in self.loading]:
            if ref is not None and request.awaits_adapter:
                # asked in any case, so that the grammar stays; the cache may have dropped it all the same
                if self._has_grammar(request) and not self._adapters.reading(ref):
                    self.loading.remove(request)
                    self._enter(request, self._adapters.failure(ref))
                    self._adapters.waited(ref)
            elif self._is_loaded(request):
                self.loading.remove(request)
                self._enter(request)

    def _is_loaded(self, request: Request) -> bool:
        """Whether the request's grammar is compiled and its adapter in memory. Otherwise start what is missing, the
        grammar first."""
        if not self._has_grammar(request):
            return False
        ref = request.adapter
        request.awaits_adapter = ref is not None and not self._adapters.ready(ref, request.message.digests)
        return not request.awaits_adapter

    def _has_grammar(self, request: Request) -> bool:
        grammar = request.message.grammar
        return grammar is None or self._compiled(grammar)

    def _enter(self, request: Request, failure: Exception | None = None) -> None:
        """Enter the batch from the queue, or after the adapter was read. With a `failure` the request ends."""
        self._plan = None
        try:
            if failure is not None:
                raise failure
            self.add(request)
        except Exception as error:  # noqa: BLE001 - `failed` re-raises what concerns more than this request
            request.state = State.ENDED
            del self.requests[request.id]
            self._failed(request, error)

    # ---- steps

    def propose(self) -> Plan:
        """Plan the next step, of at most `budget` tokens: decodes, then prompts under way, then new ones. At most
        `scored_tokens` belong to prompts that are scored. If the budget has less than a token for each active request,
        the latest are left out."""
        blocked = not self.active and self._line.reads
        if self._plan is None or self._plan.blocked != blocked:  # an adapter was evicted, or read again
            active = self.active.first(self.budget.tokens)
            batch_headroom = self._batch_headroom
            waiting = self.queue.waiting(self.headroom, batch_headroom)
            pending = [(request, request.pending) for request in active]
            scheduled = [Scheduled(request, 1) for request, tokens in pending if tokens == 1]
            tokens = self.budget.tokens - len(scheduled)
            left = BudgetLeft(tokens, min(tokens, self._scored_tokens))
            scheduled += left.fill([request for request, tokens in pending if tokens > 1])
            in_line = [*scheduled, *left.fill(self._line, in_order=True)]
            nobody = step_shape(in_line, self._adapters.size)
            with_new = [*in_line, *left.fill(waiting, in_order=True)]
            self._plan = Plan(
                scheduled=scheduled,
                waiting=waiting,
                batch_headroom=batch_headroom,
                queued=len(self.queue),
                first_arrival=self.queue.first_arrival,
                step_tokens=self.budget.tokens,
                blocked=blocked,
                deadlines=Deadlines(chain(self.active, self._line), self.budget.tokens),
                admitting_nobody=nobody,
                admitting_all=step_shape(with_new, self._adapters.size) if waiting else nobody,
            )
        return self._plan

    def commit(self, plan: Plan, admit: int | None = None, *, now: float) -> list[Scheduled]:
        """Take the pages for a plan, with the first `admit` waiting requests (None: all). Return what to
        compute: without preempted requests, and with as much of new prompts as finds pages."""
        assert plan is self._plan, "something has changed since it was proposed"
        for request in self.queue.pop(len(plan.waiting) if admit is None else admit, plan.batch_headroom):
            self._leave_queue(request)
        self._plan = None
        while len(self.active) > self.budget.tokens:
            self._preempt(self.active.latest)
        self.active.begin_step()
        before = self.preemptions
        scheduled = [item for item in plan.scheduled if self._grow(item.request)]
        if self._line and self.preemptions == before:
            decodes = sum(item.request.pending == 1 for item in scheduled)
            left = BudgetLeft(self.budget.tokens, min(self.budget.tokens - decodes, self._scored_tokens))
            for item in scheduled:
                self.active.writes(left.take(item))
            scheduled += self._admit(left, now)
        self.active.keeps_states(scheduled)
        if self._line and self.active.lacks_pages:
            self._few = FEW
        elif not self._line:
            self._few = min(2 * self._few, self._max_active)
        self.step_adapters += len({item.request.adapter for item in scheduled} - {None})
        return scheduled

    def _leave_queue(self, request: Request) -> None:
        if self._is_loaded(request):
            self._enter(request)
        else:
            request.state = State.LOADING
            self.loading.append(request)

    def recompute(self, requests: Iterable[Request], *, always: bool = False) -> None:
        """Preempt those of these requests, whose step did not finish, that must restart from their first token: all if
        the base has recurrent states, which the step may have advanced, or if `always`; else those that share pages
        which the step should have written."""
        for request in requests:
            if request.pages and (always or self._recurrent or self.active.reads_unwritten(request)):
                self._put_back(request)

    def _grow(self, request: Request) -> bool:
        """Allocate a page for the next token if needed, preempting the latest requests; False if this one was
        preempted."""
        while request.pages:
            if self.active.grow(request):
                return True
            victim = self.active.latest
            assert victim is not request or len(self.active) > 1, "a sequence alone does not fit the pool"
            self._preempt(victim)
        return False

    def _put_back(self, request: Request) -> None:
        self.active.leave(request)
        self._stand_in_line(request)

    def _preempt(self, request: Request) -> None:
        self._put_back(request)
        self.preemptions += 1
        self.active.lacks_pages = True
        if str(self.preemptions).rstrip("0") == "1":
            log.warning(PREEMPTED, self.preemptions)

    def _stand_in_line(self, request: Request) -> None:
        self._line.add(request)
        self._plan = None

    def _admit(self, left: BudgetLeft, now: float) -> list[Scheduled]:
        """Activate requests that wait for pages, in the line's order, while there are places, tokens and pages."""
        scheduled = list[Scheduled]()
        for request in self._line.in_turn(now):
            if len(self.active) >= min(self._max_active, self.budget.tokens) or left.for_prompt(request) <= 0:
                break
            if self.active.enter(request):
                self._line.remove(request)
                scheduled.append(left.take(Scheduled(request, left.for_prompt(request))))
                self.active.writes(scheduled[-1])
        return scheduled
