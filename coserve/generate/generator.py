"""Generation: many requests, each with its adapter, in one packed forward a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from sys import maxsize

import torch

from coserve.core.errors import (
    CoserveError,
    EngineFault,
    InvalidRequest,
    LoraServerLost,
    RequestOutOfMemory,
    failure_text,
)
from coserve.core.link.generation import MAX_PROMPT_LOGPROBS, Generate, RequestFailed, Tokens
from coserve.core.link.stats import AllocatorStats
from coserve.core.logprobs import PackedLogprobs, TokenLogprob
from coserve.core.types import FinishReason
from coserve.generate.checks import no_token_error
from coserve.generate.execution.interface import StepExecutor, StepInFlight, StepResult
from coserve.generate.grammars import Grammars
from coserve.generate.output_lengths import OutputLengths
from coserve.generate.plan import Ran, Scheduled, step_shape
from coserve.generate.preparation import Preparation, compute_here
from coserve.generate.sampling.choices import Choice, NoToken
from coserve.generate.schedule import SCORED_TOKENS, Scheduler
from coserve.generate.step_input import step_input
from coserve.lora.store.store import AdapterStore
from coserve.memory.allocator import allocator_stats
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.faults import contained, memory_numbers, out_of_memory
from coserve.queues.request import Request, State
from coserve.queues.shapes import StepShape

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Launched:
    """A launched step, and what it computes."""

    step: StepInFlight
    scheduled: list[Scheduled]
    samples: frozenset[int]
    """Numbers of the requests that sample a token in the step."""
    shape: StepShape


class Generator:
    """Runs the steps that the scheduler plans. Requests enter through the scheduler (or `add`), `run` returns tokens.
    Between steps, requests may arrive and be cancelled.

    On CPU the tokens of a request depend only on the request (prompt, parameters, seed, adapter version), bit for bit,
    regardless of other requests and preemptions. On CUDA, rounding may occasionally change a token.
    """

    def __init__(
        self,
        base: Base,
        store: AdapterStore,
        kv: KvCache,
        executor: StepExecutor,
        *,
        max_running: int,
        step_tokens: int,
        max_queue: int = maxsize,
        fair: bool = True,
        prefix_cache: bool = True,
        scored_tokens: int = SCORED_TOKENS,
        lengths: OutputLengths | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`executor`: runs the steps; `step_tokens`: token budget of a step; `max_running`: most requests in the batch,
        at most `step_tokens` of which hold pages; `max_queue`, `fair`: see `InferenceQueue`; `prefix_cache`: share
        pages of common prefixes between sequences of one adapter version; `scored_tokens`: most tokens of a step in
        prompts that are scored; `lengths`: of past answers; `grammars`: None: no request may have a constraint."""
        assert max_running > 0 < step_tokens, f"expected at least 1 each, got {max_running=}, {step_tokens=}"
        self._base, self._store, self._kv = base, store, kv
        store.use_pool(kv.buffer, executor.evicted, executor.kept)
        preparation = Preparation(base.spec, store, kv, grammars, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(
            kv,
            store,
            max_running=max_running,
            step_tokens=step_tokens,
            max_queue=max_queue,
            fair=fair,
            scored_tokens=scored_tokens,
            lengths=lengths,
            compiled=lambda grammar: grammars is None or grammars.ready(grammar),
            prepare=preparation.prepare,
            failed=self._refuse,
            precede=preparation.precede,
            states=None if kv.states is None else kv.states.slots,
        )
        self._grammars = grammars
        self._executor = executor
        self._in_flight: list[_Launched] = []
        self._failed_alone: int | None = None
        """Number of a sequence whose step of one token just ran out of memory; it is retried once."""
        self._computed: StepShape | None = None
        self._server_losses = 0
        """Losses of LoRA servers whose requests were put back."""
        self._failed: list[RequestFailed] = []
        """Requests that failed outside of a collected step and are not reported yet."""
        self._numbered: dict[int, Request] = {}
        """Requests of the batch that have started, by number; an id may be reused while a step of its first request is
        in flight."""

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self.scheduler)

    @property
    def pages_used(self) -> int:
        return self._kv.pool.used

    @property
    def adapter_pages(self) -> int:
        """Pages that hold adapters, unused cached ones included."""
        return self._kv.pool.in_spans

    def allocator(self) -> AllocatorStats:
        """Allocator statistics of the whole process: pages, base and training included."""
        return allocator_stats(self._base.device)

    @property
    def pages_total(self) -> int:
        return self._kv.pool.total

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what runs slower than it could, and why."""
        return self._kv.notes

    @property
    def troubles(self) -> tuple[str, ...]:
        """Notes on what was reduced since memory ran out."""
        budget = self.scheduler.budget
        if not budget.lowered:
            return self._executor.troubles
        how = f"a step has at most {budget.tokens} tokens instead of {budget.full} until more fit"
        return (*self._executor.troubles, f"generation: memory ran out; {how}")

    @property
    def graphs_missing(self) -> int:
        return self._executor.graphs_missing

    def add(self, message: Generate) -> None:
        """Put a request into the batch, bypassing the queue. Its `max_tokens` is cut to what the context leaves after
        the prompt.

        Raises:
            EmptyPrompt: no prompt tokens.
            PromptTooLong, AdapterTooLarge: the prompt fills the context, or the request or its adapter could never fit
                the pool.
            InvalidRequest: an id that runs already, or a token id outside of the vocabulary.
            AdapterNotFound, AdapterError: what `AdapterStore.acquire` raises.
        """
        self.scheduler.add(Request(message))

    def cancel(self, id: str) -> None:
        """Drop a request and free its pages; does nothing if it has ended."""
        if (request := self.scheduler.requests.get(id)) is not None:
            self._end(request)

    @torch.no_grad()
    def prepare(self) -> bool:
        """Do some tenths of a second of work that a later step would need; False if none is left."""
        return self._executor.prepare()

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched whose tokens have not been collected."""
        return bool(self._in_flight)

    def step(self) -> list[Tokens | RequestFailed]:
        """Run one step of all requests, admitting all that wait."""
        self.scheduler.take_loaded()
        return self.run(self.scheduler.commit(self.scheduler.propose(), now=time.monotonic())).messages

    @torch.no_grad()
    def run(self, scheduled: Sequence[Scheduled]) -> Ran:
        """Run one iteration: launch what `Scheduler.commit` returned (a token for each decode, and prompt
        chunks), and collect finished steps.

        A token that ends a sequence (end of sequence, stop id) is part of the output. If the executor overlaps steps,
        the returned tokens are those of the previous step.
        """
        started = [item.request for item in scheduled if not item.request.started]
        for request in started:
            request.started = True
            self._numbered[request.number] = request
        launched = self._launch(scheduled) if scheduled else []
        messages = self._collect_flight()
        messages.extend(self._choose(launched))
        for launch in launched:
            if launch.step.overlaps:
                self._in_flight.append(launch)
            else:
                messages.extend(self._collect(launch))
        return self._ran(messages, {request.id: request.cached for request in started})

    def collect(self) -> Ran:
        """Wait for the step in flight, if any, and return its tokens."""
        return self._ran(self._collect_flight(), {})

    def take_failed(self) -> list[RequestFailed]:
        """Return and clear the requests that failed without a step or at its launch: their adapters could not be read,
        or they were refused."""
        before, self._server_losses = self._server_losses, self._store.server_losses
        if before != self._server_losses:
            for request, error in compute_here(self.scheduler, self._store, self._kv):
                self._refuse(request, error)
        failed, self._failed = self._failed, []
        return failed

    def _ran(self, messages: list[Tokens | RequestFailed], started: dict[str, int]) -> Ran:
        computed, self._computed = self._computed, None
        return Ran([*messages, *self.take_failed()], started, computed)

    def _collect_flight(self) -> list[Tokens | RequestFailed]:
        steps, self._in_flight = self._in_flight, []
        return [message for step in steps for message in self._collect(step)]

    def _launch(self, scheduled: Sequence[Scheduled]) -> list[_Launched]:
        """Launch a step. If memory runs out or LoRA servers are lost, nothing is launched; any other error ends the
        step's requests."""
        step, adapters = step_input(scheduled, self._store.in_pages)
        try:
            with contained(self._base.device):
                self._kv.buffer.step_begins()
                launched = self._executor.launch(step, adapters)
        except EngineFault:
            raise
        except Exception as error:  # noqa: BLE001 - any error concerns only these requests
            if out_of_memory(error):
                self._lower_memory(scheduled, error)
            elif isinstance(error, LoraServerLost):
                self.scheduler.recompute([item.request for item in scheduled])
            else:
                self._failed += self._abort_all([item.request for item in scheduled], error)
            return []
        samples = frozenset(own.sequence for own in step.sequences if own.sampling is not None)
        by_number = {item.request.number: item for item in scheduled}
        found = []
        for own in launched:
            parts = [by_number[number] for number in own.sequences]
            shape = step_shape(parts, self._store.size, alone=not self._in_flight)
            found.append(_Launched(own, parts, samples, shape))
        for item in scheduled:
            item.request.computed += item.tokens
            item.request.in_flight += item.request.number in samples
        self.scheduler.changed()
        return found

    def _choose(self, launched: list[_Launched]) -> list[RequestFailed]:
        """Compute the masks of constrained requests, and let the executor choose their tokens with them. An error ends
        the step's requests."""
        requests = [item.request for launch in launched for item in launch.scheduled]
        sampled = {number for launch in launched for number in launch.samples}
        masked = [each for each in requests if each.constraint is not None and each.number in sampled]
        if not masked or self._grammars is None:
            return []
        try:
            with contained(self._base.device):
                self._executor.choose(self._grammars.masks([each for each in masked if self._runs(each)]))
        except EngineFault:
            raise
        except Exception as error:  # noqa: BLE001 - any error concerns only these requests
            launched.clear()
            return self._abort_all([each for each in requests if self._runs(each)], error)
        return []

    def _undo(self, launched: _Launched) -> None:
        """Reset the requests to before the launch of a step that did not finish.

        Keys and values that it has written will be written again, with the same values.
        """
        for item in launched.scheduled:
            if self._runs(item.request):
                item.request.computed -= item.tokens
                item.request.in_flight -= item.request.number in launched.samples
        self.scheduler.changed()

    def _lower_memory(self, scheduled: Sequence[Scheduled], error: Exception) -> None:
        """React to an out-of-memory in this step: lower the step budget, or end a request if not even one token
        fits."""
        tokens, numbers = sum(item.tokens for item in scheduled), memory_numbers(error, self._base.device)
        self.scheduler.recompute([item.request for item in scheduled])
        if tokens == 1:
            request = scheduled[0].request
            if self._failed_alone != request.number:  # retry once: memory may be free again
                self._failed_alone = request.number
                return
            message = f"not enough memory for one token after {request.computed} others ({numbers}); try again later"
            log.warning("request %s: %s", request.id, message)
            if self._runs(request):
                self._refuse(request, RequestOutOfMemory(message))
            return
        budget = self.scheduler.budget
        budget.lower(tokens)
        log.warning("no memory for a step of %d tokens (%s): at most %d from now on", tokens, numbers, budget.tokens)

    def _collect(self, launched: _Launched) -> list[Tokens | RequestFailed]:
        """Return the messages of one step. An error ends the step's requests; shared state is unaffected. A step that
        ran out of memory is undone."""
        step = launched.step
        self.scheduler.changed()
        # The others ended with an earlier step, or were cancelled.
        running = [request for number in step.sequences if (request := self._numbered.get(number)) is not None]
        try:
            with contained(self._base.device):
                result = step.collect()
                self._computed = launched.shape if self._computed is None else self._computed + launched.shape
                self.scheduler.budget.succeeded()
                self._failed_alone = None
                return self._accept(running, result)
        except EngineFault:
            raise
        except Exception as error:  # noqa: BLE001 - any error concerns only these requests
            if isinstance(error, LoraServerLost):
                self._undo(launched)
                self.scheduler.recompute([item.request for item in launched.scheduled])
                return []
            if out_of_memory(error) and not step.overlaps:
                self._undo(launched)
                self._lower_memory(launched.scheduled, error)
                return []
            return [*self._abort_all(running, error)]

    def _abort_all(self, sequences: Sequence[Request], error: Exception) -> list[RequestFailed]:
        log.error("requests %s: internal error", ", ".join(own.id for own in sequences), exc_info=error)
        return [self._abort(own, error) for own in sequences]

    def _abort(self, request: Request, error: Exception) -> RequestFailed:
        """End a request whose step raised. Raises `EngineFault` if its pages cannot be freed."""
        try:
            if self._runs(request):  # otherwise it ended in the step, and its last message is lost
                self.scheduler.active.disown(request)
                self._end(request)
        except Exception as broken:  # any kind: then nothing is known of the pages
            raise EngineFault("the pages of a request that failed cannot be freed") from broken
        code, message = failure_text(error)
        return RequestFailed(id=request.id, code=code, message=message)

    def _refuse(self, request: Request, error: Exception) -> None:
        """End a request without a step. Raises `error` if it is an `EngineFault`."""
        if isinstance(error, EngineFault):
            raise error
        if not isinstance(error, CoserveError):
            log.error("request %s: internal error", request.id, exc_info=error)
        self._failed.append(self._abort(request, error))

    def _runs(self, request: Request) -> bool:
        return request.state is State.ACTIVE

    def _accept(self, running: Sequence[Request], result: StepResult) -> list[Tokens | RequestFailed]:
        """Process a step's result: prompt scores first, then requests that asked for nothing else end, then sampled
        tokens."""
        messages: list[Tokens | RequestFailed] = []
        for number, entries in result.scores:
            messages.extend(self._score(self._numbered[number], entries))
        for request in running:
            if not request.max_tokens and not request.pending and self._runs(request):
                self._end(request)
                messages.append(Tokens(id=request.id, tokens=(), finished=FinishReason.LENGTH))
        for number, choice in result.sampled:
            sampled = self._numbered.get(number)
            if sampled is not None:
                sampled.in_flight -= 1
                messages.append(self._push(sampled, choice))
        return messages

    def _score(self, request: Request, entries: tuple[TokenLogprob, ...] | None) -> list[Tokens | RequestFailed]:
        """Return the log-probabilities of prompt tokens in chunks; `entries` None: they are not finite."""
        if entries is None:
            return [self._fail(request, NoToken.NOT_FINITE)]
        request.scored += len(entries)
        parts = (entries[first : first + MAX_PROMPT_LOGPROBS] for first in range(0, len(entries), MAX_PROMPT_LOGPROBS))
        return [Tokens(id=request.id, tokens=(), prompt_logprobs=PackedLogprobs.of(part)) for part in parts]

    def _fail(self, request: Request, reason: NoToken) -> RequestFailed:
        if reason is NoToken.NOT_FINITE:
            self.scheduler.active.disown(request)
        self._end(request)
        error = no_token_error(request, reason)
        return RequestFailed(id=request.id, code=error.code, message=error.message)

    def _push(self, request: Request, choice: Choice | NoToken) -> Tokens | RequestFailed:
        if isinstance(choice, NoToken):
            return self._fail(request, choice)
        finished = request.push(choice.token)
        if request.constraint is not None and (reason := request.constraint.error):
            self._end(request)
            message = f"the grammar cannot be enforced further: {reason[:500]}"
            return RequestFailed(id=request.id, code=InvalidRequest.code, message=message)
        if finished is not None:
            self._end(request)
        whole = finished is FinishReason.STOP and choice.token not in request.stop_ids
        logprobs = PackedLogprobs() if choice.logprob is None else PackedLogprobs.of((choice.logprob,))
        return Tokens(id=request.id, tokens=(choice.token,), logprobs=logprobs, finished=finished, ends_in_text=whole)

    def _end(self, request: Request) -> None:
        in_batch = self._runs(request)
        self.scheduler.remove(request)
        if in_batch:
            self._numbered.pop(request.number, None)
            self._executor.forget(request.number)
            if request.adapter is not None:
                self._store.release(request.adapter)
