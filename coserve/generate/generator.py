"""Generation: many requests, each with its adapter, one packed forward a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from coserve.adapter_store.store import AdapterStore
from coserve.errors import EngineFault, InvalidRequest, RequestOutOfMemory, failure_text
from coserve.generate.checks import allowed_tokens, check_fits_pool, no_token_error
from coserve.generate.execution.interface import StepExecutor, StepResult
from coserve.generate.output_lengths import OutputLengths
from coserve.generate.sampling.choices import Choice, NoToken
from coserve.generate.schedule import SCORED_TOKENS, Scheduler, Share
from coserve.generate.sequence_state import SequenceState
from coserve.generate.step_input import step_input
from coserve.generate.step_shape import LaunchedShares, step_shape
from coserve.link import MAX_PROMPT_LOGPROBS, Generate, RequestFailed, Tokens
from coserve.logprobs import PackedLogprobs
from coserve.memory.allocator import AllocatorStats, allocator_stats
from coserve.memory.kv import KvCache
from coserve.memory.prefix import PageKeys
from coserve.model.faults import contained, memory_numbers, out_of_memory
from coserve.queues.shapes import StepShape
from coserve.types import AdapterRef, BaseSpec, FinishReason, TokenLogprob

log = logging.getLogger(__name__)


class DescribesBase(Protocol):
    """What generation needs of `model.Base`."""

    @property
    def spec(self) -> BaseSpec: ...
    @property
    def device(self) -> torch.device: ...


class Generator:
    """Requests come in with `add`, tokens come out of `step`; between steps requests may be added and cancelled.

    On CPU the tokens of a request depend on the request alone (prompt, parameters, seed, adapter version), bit for
    bit, whatever runs beside it and however often it was preempted. On CUDA they may differ in the last bits of logits.
    """

    def __init__(
        self,
        base: DescribesBase,
        store: AdapterStore,
        kv: KvCache,
        executor: StepExecutor,
        *,
        max_running: int,
        step_tokens: int,
        prefix_cache: bool = True,
        scored_tokens: int = SCORED_TOKENS,
        lengths: OutputLengths | None = None,
    ) -> None:
        """`executor`: runs the steps; `step_tokens`: most tokens of a step; `max_running`: sequences that hold pages at once
        (no more than a step has tokens), further ones wait; `prefix_cache`: sequences of one adapter version that begin
        alike share pages; `scored_tokens`: most tokens of a step that belong to prompts which are scored; `lengths`: of past answers."""
        assert max_running > 0 < step_tokens, f"expected at least 1 each, got {max_running=}, {step_tokens=}"
        self._base, self._store, self._kv = base, store, kv
        store.use_pool(kv.buffer, self._evicted)
        self._scheduler = Scheduler(
            kv, store, max_running=max_running, step_tokens=step_tokens, scored_tokens=scored_tokens, lengths=lengths
        )
        self._prefix_cache = prefix_cache
        self._executor = executor
        self._in_flight: list[LaunchedShares] = []
        self._failed_alone: int | None = None
        """Number of a sequence for one token of which there was no memory, a step ago."""
        self._computed: StepShape | None = None
        self._launched_prompts = dict[str, int]()
        self._failed: list[RequestFailed] = []
        """Requests that ended at a launch, not yet reported."""
        self._sequences: dict[str, SequenceState] = {}
        self._numbered: dict[int, SequenceState] = {}
        """The same by their numbers: an id may come back while a step of its first request is in flight."""
        self._arrivals = 0

    @property
    def running(self) -> int:
        """Requests that were added and have not ended."""
        return len(self._sequences)

    @property
    def pages_used(self) -> int:
        return self._kv.pool.used

    @property
    def adapter_pages(self) -> int:
        """Pages that adapters lie in, also those of adapters that wait there for their next request."""
        return self._kv.pool.in_spans

    def allocator(self) -> AllocatorStats:
        """Of the whole process: pages, base and training included."""
        return allocator_stats(self._base.device)

    @property
    def pages_total(self) -> int:
        return self._kv.pool.total

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its pages to an earlier one, since the start."""
        return self._scheduler.preemptions

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens that were looked for in the prefix cache, since the start."""
        return self._scheduler.prefix_queries

    @property
    def prefix_hits(self) -> int:
        """Those of them that were found, and not computed again."""
        return self._scheduler.prefix_hits

    @property
    def room(self) -> int:
        """How many more requests may be added so that few wait for pages."""
        return self._scheduler.room

    @property
    def notes(self) -> tuple[str, ...]:
        """What runs slower than it could, and why."""
        return self._kv.notes

    @property
    def troubles(self) -> tuple[str, ...]:
        """What is done in smaller parts since memory ran out."""
        budget = self._scheduler.budget
        if not budget.lowered:
            return self._executor.troubles
        return (
            *self._executor.troubles,
            f"generation: memory ran out; a step has at most {budget.tokens} tokens instead of {budget.full} until more fit",
        )

    def add(self, request: Generate) -> None:
        """Put a request in line. Its `max_tokens` is cut to what the context leaves after the prompt.

        Raises:
            EmptyPrompt: no prompt tokens.
            PromptTooLong, AdapterTooLarge: the prompt fills the context, or the request or its adapter could never fit the pool.
            InvalidRequest: an id that runs already, or a token id outside of the vocabulary.
            AdapterNotFound, AdapterError: what `AdapterStore.acquire` raises.
        """
        if request.id in self._sequences:
            raise InvalidRequest(f"expected a new request id, got {request.id!r}, which is running", field="id")
        max_tokens = allowed_tokens(request, self._base.spec)
        check_fits_pool(request, max_tokens, self._kv, adapter_pages=0)
        if request.adapter is not None:
            self._acquire(request.adapter, request, max_tokens)
        sampling = request.sampling
        ends = () if sampling.ignore_eos else self._base.spec.eos_token_ids
        sequence = SequenceState(
            request,
            number=self._arrivals,
            max_tokens=max_tokens,
            stop_ids=frozenset((*sampling.stop_token_ids, *ends)),
            tokens=list(request.prompt),
            keys=self._keys(request) if self._prefix_cache else None,
        )
        self._arrivals += 1
        self._sequences[request.id] = self._numbered[sequence.number] = sequence
        self._scheduler.add(sequence)

    def cancel(self, id: str) -> None:
        """Forget a request and free its pages at once; nothing happens if it has ended already."""
        sequence = self._sequences.get(id)
        if sequence is not None:
            self._end(sequence)

    def started(self) -> list[str]:
        """The requests that were scheduled for the first time since the last call. Before that they waited for a place in
        the batch, or for pages."""
        found, self._scheduler.started = self._scheduler.started, []
        return [sequence.id for sequence in found]

    def adopt(self, executor: StepExecutor) -> None:
        """From now on `executor` runs the steps, as if it had been there from the start."""
        assert not self._in_flight, "expected no step in flight"
        self._executor = executor

    @torch.no_grad()
    def prepare(self) -> bool:
        """Some tenths of a second of work that a later step would have to do; False if nothing is left of it."""
        return self._executor.prepare()

    @property
    def blocked(self) -> bool:
        """A step would compute nothing: whoever is next waits for an adapter that was evicted and is being read again."""
        return not self._in_flight and self._scheduler.blocked

    @property
    def in_flight(self) -> bool:
        """A step was launched whose tokens have not been collected."""
        return bool(self._in_flight)

    def launched_prompts(self) -> Mapping[str, int]:
        """By request: tokens of its prompt that are still to be computed after the step that was launched last, for each prompt that this step works on."""
        return self._launched_prompts

    def computed(self) -> StepShape | None:
        """What the steps computed that were collected since the last call; None: there were none."""
        computed, self._computed = self._computed, None
        return computed

    @torch.no_grad()
    def step(self) -> list[Tokens | RequestFailed]:
        """One iteration: a token for each running sequence, and chunks of prompts; one message per token or failure.

        A token that ends a sequence (end of sequence, stop id) is part of the output. Where the executor overlaps steps,
        the tokens are those of the step before.
        """
        shares = self._scheduler.plan()
        self._launched_prompts = dict[str, int]()
        launched = self._launch(shares) if shares else []
        messages = self.collect()
        for launch in launched:
            if launch.step.overlaps:
                self._in_flight.append(launch)
            else:
                messages.extend(self._collect(launch))
        messages += self._failed
        self._failed = []
        failed, self._scheduler.failed = self._scheduler.failed, []
        # One that was preempted may have ended with the step in flight.
        return messages + [self._abort(sequence, error) for sequence, error in failed if self._runs(sequence)]

    def collect(self) -> list[Tokens | RequestFailed]:
        """Waits for the step in flight, if there is one, and gives its tokens."""
        steps, self._in_flight = self._in_flight, []
        return [message for step in steps for message in self._collect(step)]

    def _launch(self, shares: Sequence[Share]) -> list[LaunchedShares]:
        """Launch the step of these shares. Where memory runs out nothing is launched. Any other error ends the sequences."""
        step, adapters = step_input(shares)
        try:
            with contained(self._base.device):
                launched = self._executor.launch(step, adapters)
        except EngineFault:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is these requests' alone
            if out_of_memory(error):
                self._lower_memory(shares, error)
            else:
                self._failed += self._abort_all([share.sequence for share in shares], error)
            return []
        samples = frozenset(own.sequence for own in step.sequences if own.sampling is not None)
        by_number = {share.sequence.number: share for share in shares}
        found = []
        for own in launched:
            parts = [by_number[number] for number in own.sequences]
            shape = step_shape(parts, self._store.size, alone=not self._in_flight)
            found.append(LaunchedShares(own, parts, samples, shape))
        for share in shares:
            if (left := len(share.sequence.request.prompt) - share.sequence.computed) > 0:
                self._launched_prompts[share.sequence.id] = max(0, left - share.tokens)
            share.sequence.computed += share.tokens
            share.sequence.in_flight += share.sequence.number in samples
        return found

    def _undo(self, launched: LaunchedShares) -> None:
        """The sequences are as before the launch of a step that was not computed to its end.

        Keys and values that it has written are written again, with the same values.
        """
        for share in launched.shares:
            if self._runs(share.sequence):
                share.sequence.computed -= share.tokens
                share.sequence.in_flight -= share.sequence.number in launched.samples

    def _lower_memory(self, shares: Sequence[Share], error: Exception) -> None:
        """Memory ran out for these shares: smaller steps from now on, or the end of a request that does not fit alone."""
        tokens, numbers = sum(share.tokens for share in shares), memory_numbers(error, self._base.device)
        if tokens == 1:
            sequence = shares[0].sequence
            if self._failed_alone != sequence.number:  # tried once more: memory may be there again
                self._failed_alone = sequence.number
                return
            message = f"not enough memory for one token after {sequence.computed} others ({numbers}); try again later"
            log.warning("request %s: %s", sequence.id, message)
            if self._runs(sequence):
                self._failed.append(self._abort(sequence, RequestOutOfMemory(message)))
            return
        budget = self._scheduler.budget
        budget.lower(tokens)
        log.warning("no memory for a step of %d tokens (%s): at most %d from now on", tokens, numbers, budget.tokens)

    def _collect(self, launched: LaunchedShares) -> list[Tokens | RequestFailed]:
        """The messages of one step. What it raises ends the requests in it: nothing of it is in what others share. A step
        that found too little memory is undone."""
        step = launched.step
        # Others have ended with an earlier step, or were cancelled.
        running = [sequence for number in step.sequences if (sequence := self._numbered.get(number)) is not None]
        try:
            with contained(self._base.device):
                result = step.collect()
                self._computed = launched.shape if self._computed is None else self._computed + launched.shape
                self._scheduler.budget.succeeded()
                self._failed_alone = None
                return self._accept(running, result)
        except EngineFault:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is these requests' alone
            if out_of_memory(error) and not step.overlaps:
                self._undo(launched)
                self._lower_memory(launched.shares, error)
                return []
            return [*self._abort_all(running, error)]

    def _abort_all(self, sequences: Sequence[SequenceState], error: Exception) -> list[RequestFailed]:
        log.error("requests %s: internal error", ", ".join(own.id for own in sequences), exc_info=error)
        return [self._abort(own, error) for own in sequences]

    def _abort(self, sequence: SequenceState, error: Exception) -> RequestFailed:
        """The end of a request whose step raised. Raises `EngineFault` if its pages cannot be freed."""
        try:
            if self._runs(sequence):  # else it ended in the step, and its last message is lost
                self._scheduler.disown(sequence)
                self._end(sequence)
        except Exception as broken:
            raise EngineFault("the pages of a request that failed cannot be freed") from broken
        code, message = failure_text(error)
        return RequestFailed(id=sequence.id, code=code, message=message)

    def _runs(self, sequence: SequenceState) -> bool:
        return sequence.number in self._numbered

    def _evicted(self, ref: AdapterRef) -> None:
        """An adapter has lost its GPU copy."""
        self._executor.evicted(ref)

    def _keys(self, request: Generate) -> PageKeys:
        return PageKeys(
            self._kv.page_tokens,
            base=self._base.spec.fingerprint,
            adapter=request.adapter,
            salt=request.cache_salt,
        )

    def _acquire(self, ref: AdapterRef, request: Generate, max_tokens: int) -> None:
        self._store.acquire(ref)
        try:
            check_fits_pool(request, max_tokens, self._kv, adapter_pages=self._store.pages(ref))
        except Exception:
            self._store.release(ref)
            raise

    def _accept(self, running: Sequence[SequenceState], result: StepResult) -> list[Tokens | RequestFailed]:
        """Scores first, then the ends of requests that ask for nothing else, then sampled tokens."""
        messages: list[Tokens | RequestFailed] = []
        for number, entries in result.scores:
            messages.extend(self._score(self._numbered[number], entries))
        for sequence in running:
            if not sequence.max_tokens and not sequence.pending and self._runs(sequence):
                self._end(sequence)
                messages.append(Tokens(id=sequence.id, tokens=(), finished=FinishReason.LENGTH))
        for number, choice in result.sampled:
            sampled = self._numbered.get(number)
            if sampled is not None:
                sampled.in_flight -= 1
                messages.append(self._push(sampled, choice))
        return messages

    def _score(self, sequence: SequenceState, entries: tuple[TokenLogprob, ...] | None) -> list[Tokens | RequestFailed]:
        """Log-probabilities of prompt tokens; None: they are not finite."""
        if entries is None:
            return [self._fail(sequence, NoToken.NOT_FINITE)]
        sequence.scored += len(entries)
        parts = (entries[first : first + MAX_PROMPT_LOGPROBS] for first in range(0, len(entries), MAX_PROMPT_LOGPROBS))
        return [Tokens(id=sequence.id, tokens=(), prompt_logprobs=PackedLogprobs.of(part)) for part in parts]

    def _fail(self, sequence: SequenceState, reason: NoToken) -> RequestFailed:
        if reason is NoToken.NOT_FINITE:
            self._scheduler.disown(sequence)
        self._end(sequence)
        error = no_token_error(sequence, reason)
        return RequestFailed(id=sequence.id, code=error.code, message=error.message)

    def _push(self, sequence: SequenceState, choice: Choice | NoToken) -> Tokens | RequestFailed:
        if isinstance(choice, NoToken):
            return self._fail(sequence, choice)
        finished = sequence.push(choice.token)
        if finished is not None:
            self._end(sequence)
        logprobs = PackedLogprobs.of(() if choice.logprob is None else (choice.logprob,))
        return Tokens(id=sequence.id, tokens=(choice.token,), logprobs=logprobs, finished=finished)

    def _end(self, sequence: SequenceState) -> None:
        del self._sequences[sequence.id], self._numbered[sequence.number]
        self._executor.forget(sequence.number)
        self._scheduler.remove(sequence)
        if sequence.adapter is not None:
            self._store.release(sequence.adapter)
