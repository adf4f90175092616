"""Requests in flight. A checked request becomes a stream of chunks; every stream ends, whatever fails."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from coserve.api.adapters.in_use import AdaptersInUse
from coserve.api.adapters.lookup import find_adapter
from coserve.api.adapters.warm_set import WarmSet
from coserve.api.generation.async_tokenizer import AsyncTokenizer
from coserve.api.generation.output_grammar import output_grammar
from coserve.api.generation.output_queue import EngineOutput
from coserve.api.generation.prompt_group import PromptGroup
from coserve.api.generation.prompts import bad_word_ids, check_generate, encode_prompt, sampling_params
from coserve.api.generation.request_state import RequestState, new_state
from coserve.api.generation.stop_tokens import stop_tokens
from coserve.api.generation.waiting_limit import IterationBudget, WaitingLimit
from coserve.api.metrics.prometheus import Metrics
from coserve.api.metrics.traces import Traces
from coserve.api.node import Node
from coserve.config import Config
from coserve.core.access.principal import cache_salt, principal
from coserve.core.errors import EngineUnavailable, Overloaded, QueueFull, error_from_code
from coserve.core.grammar import CallStart, Grammar
from coserve.core.link.generation import Admitted, CancelRequest, Generate, RequestFailed, Tokens
from coserve.core.logprobs import BYTES_PER_TOP
from coserve.core.names import split_ref
from coserve.core.schemas.generation import GenerateChunk, GenerateRequest
from coserve.core.types import AdapterDigests, AdapterRef, Slo

MAX_PROMPT_SCORES = 1 << 21
"""Most prompt log-probabilities that all requests in flight may ask for together."""
ITERATION_VALUES = 4096
"""Tokens and log-probabilities turned into chunks per event-loop iteration: 5 to 10 ms with all that follows."""


class InFlightRequests:
    """All requests in flight. `max_prompt_scores`: most prompt log-probabilities that they may ask for together."""

    def __init__(
        self, node: Node, texts: AsyncTokenizer, metrics: Metrics, *, max_prompt_scores: int = MAX_PROMPT_SCORES
    ) -> None:
        self._config, self._engine, self._registry = node.config, node.engine, node.registry
        self._tokenizer, self._texts, self._metrics = node.tokenizer, texts, metrics
        self._states: dict[str, RequestState] = {}
        """State of the request, by the id of each of its sequences that has not ended."""
        self._budget = IterationBudget(ITERATION_VALUES)
        self._waiting = WaitingLimit(node.config.max_queue, fair=node.config.fair)
        self._prompt_scores, self._max_prompt_scores = 0, max_prompt_scores
        self._stopped: EngineUnavailable | None = None
        self.charge: Callable[[str, int], None] = lambda project, tokens: None
        """Called with a project and the tokens of prompts and texts that its requests have used."""
        self.traces: Traces | None = None
        self.in_use = AdaptersInUse()
        """Adapter versions that requests in flight use."""
        self.warm_set = WarmSet(node)

    # ---- messages of the engine

    def deliver(self, message: EngineOutput) -> None:
        """Queue a message for its request; a message for a cancelled request is dropped."""
        if (state := self._states.get(message.id)) is not None:
            state.outputs.put(message)

    def fail_all(self, error: EngineUnavailable) -> None:
        """End every request in flight with this error, because the engine ended."""
        for id, state in self._states.items():
            state.outputs.put(RequestFailed(id=id, code=error.code, message=error.message))

    def stop(self, error: EngineUnavailable) -> None:
        """End every request in flight, and every later one, with this error."""
        self._stopped = error
        self.fail_all(error)

    def report_adapters(self) -> None:
        """Set the metric of the adapters of requests that run, and of those that wait in the engine."""
        running, waiting = set[str](), set[str]()
        for state in self._states.values():
            if state.adapter is not None:
                (waiting if state.admitted is None else running).add(state.adapter.id)
        self._metrics.adapters(running, waiting, self._config.max_running)

    # ---- requests of clients

    async def stream(
        self,
        request: GenerateRequest,
        semaphore: asyncio.Semaphore | None = None,
        *,
        snapshot: AdapterRef | None = None,
        group: PromptGroup | None = None,
        read_prompt: Callable[[Sequence[int]], None] | None = None,
        calls: Sequence[CallStart] = (),
        sheds: bool = True,
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the chunks of all choices as they come. Closing the generator early cancels the request in the engine.

        `semaphore`, shared by several streams, limits the chunks that they hold: a chunk is made and yielded under it.
        `snapshot`: the adapter of a job in training (`JobSnapshot`) to use. `sheds`: whether the request may be shed
        for its deadline; with a `snapshot` it never is. `group`: shared by all prompts of one call. `read_prompt`:
        called with the prompt's token ids, before the first chunk. `calls`: see `output_grammar`.

        Raises, before the first chunk only: `InvalidRequest`, `EmptyPrompt`, `PromptTooLong`, `AdapterNotFound`,
        `BaseMismatch`, `QueueFull`, `Overloaded`; at any time: `EngineUnavailable`.
        """
        arrived = time.monotonic()
        semaphore = asyncio.Semaphore() if semaphore is None else semaphore
        state: RequestState | None = None
        prompt_scores = 0
        id = f"gen-{secrets.token_hex(8)}"
        name, version = (None, None) if request.adapter is None else split_ref(request.adapter)
        batch = request.slo_class == "batch"
        waiting = self._start_waiting(name, request.n, batch=batch)
        try:
            check_generate(request, self._engine.spec)
            grammar = await output_grammar(request, calls)
            bad_words: tuple[tuple[int, ...], ...] = ()
            if request.bad_words:
                bad_words = await asyncio.to_thread(bad_word_ids, request.bad_words, self._tokenizer)
            prompt = await encode_prompt(request, self._engine.spec, self._texts)
            if read_prompt is not None:
                read_prompt(prompt)
            adapter, digests = snapshot, None
            if name is not None:
                spec = self._engine.spec
                record = await find_adapter(self._registry, name, version, spec, field="adapter", key=id)
                adapter, digests = record.ref, record.digests
            prompt_scores = self._reserve_prompt_scores(request, len(prompt))
            slo = targets_of(request, self._config, device=self._engine.spec.device, sheds=sheds and snapshot is None)
            state = new_state(id, request, prompt, adapter, self._tokenizer, arrived)
            if snapshot is None:
                self.charge(principal().project, len(prompt))
            if adapter is not None:
                self.in_use.add(adapter)
                if snapshot is None:
                    self.warm_set.used(adapter)
            messages = self._messages(request, state, digests, slo, grammar, bad_words)
            await self._send(state, messages, group or PromptGroup())
            while state.decoders.keys() & self._states.keys():
                message = await state.outputs.get()
                if isinstance(message, Tokens) and snapshot is None:
                    self.charge(principal().project, len(message.tokens))
                if isinstance(message, Tokens) and waiting:
                    self._waiting.release(name, waiting, batch=batch)
                    waiting = 0
                async with semaphore:
                    if isinstance(message, Tokens):
                        await self._budget.acquire(_values(message))
                    if (chunk := self._process(state, message)) is not None:
                        yield chunk
        finally:
            self._waiting.release(name, waiting, batch=batch)
            self._prompt_scores -= prompt_scores
            if state is not None:
                self._forget(state)
                if self.traces is not None:
                    self.traces.generation(request, state, self._engine.name(), time.monotonic(), sys.exception())

    def _start_waiting(self, adapter: str | None, count: int, *, batch: bool) -> int:
        try:
            self._waiting.acquire(adapter, count, batch=batch)
        except QueueFull:
            self._metrics.refused.inc()
            raise
        return count

    def _reserve_prompt_scores(self, request: GenerateRequest, tokens: int) -> int:
        count = 0 if request.prompt_logprobs is None else tokens * (request.prompt_logprobs + 1)
        if self._prompt_scores + count > self._max_prompt_scores:
            self._metrics.refused.inc()
            raise QueueFull("too many log-probabilities of prompts at once")
        self._prompt_scores += count
        return count

    def _messages(
        self,
        request: GenerateRequest,
        state: RequestState,
        digests: AdapterDigests | None,
        slo: Slo,
        grammar: Grammar | None,
        bad_words: tuple[tuple[int, ...], ...],
    ) -> list[Generate]:
        """Return one engine message for each choice, each a sequence."""
        max_new_tokens = max(1, self._engine.max_model_len - len(state.prompt))
        stops = stop_tokens(request, self._tokenizer)
        allowed = None if request.allowed_token_ids is None else tuple(request.allowed_token_ids)
        return [
            Generate(
                id=sequence,
                prompt=state.prompt,
                sampling=sampling_params(request, index, state.seed, max_new_tokens, stops),
                adapter=state.adapter,
                slo=slo,
                cache_salt=cache_salt(request.cache_salt),
                digests=digests,
                arrived=state.arrived,
                grammar=grammar,
                allowed_token_ids=allowed,
                bad_words=bad_words,
            )
            for index, sequence in enumerate(state.decoders)
        ]

    async def _send(self, state: RequestState, messages: Sequence[Generate], group: PromptGroup) -> None:
        """Send a request to the engine, with the rest of its group once all have joined. Raises `EngineUnavailable`."""
        if not group.join(state, messages):
            await group.wait()
            return
        if self._stopped is not None:
            raise self._stopped
        for one, message in group.messages():
            self._engine.send(message)
            self._states[message.id] = one
        group.sent()

    def _process(self, state: RequestState, message: EngineOutput) -> GenerateChunk | None:
        """Return the chunk that a message adds to the stream. Raises the error that the message reports."""
        now = time.monotonic()
        if isinstance(message, Admitted):
            if state.admitted is None:
                state.admitted, state.cached = max(message.at, state.arrived), message.cached
                self._metrics.admitted(state.admitted - state.arrived, len(state.prompt))
            return None
        if isinstance(message, RequestFailed):
            self._states.pop(message.id, None)
            if message.code == QueueFull.code:
                self._metrics.refused.inc()
            elif message.code == Overloaded.code:
                self._metrics.shed.inc()
            for one in state.together:
                one.refused = message.code in (QueueFull.code, Overloaded.code)
            raise error_from_code(message.code, message.message, message.retry_after)
        if message.id not in self._states:
            return None  # sampled before the engine heard of the stop string
        decoder = state.decoders[message.id]
        delta = decoder.feed(message)
        if delta.token_ids:
            self._metrics.tokens(len(delta.token_ids), state.arrived, state.last_token.get(message.id), now)
            state.first_token.setdefault(message.id, now)
            state.last_token[message.id] = now
        if delta.finished is not None:
            del self._states[message.id]
            state.finished[message.id] = delta.finished.value
            if message.finished is None:  # stopped by a stop string, which the engine does not see
                self._cancel(message.id)
            self._metrics.finished(delta.finished, decoder.count, now - state.arrived)
            self._metrics.phases(state.admitted, state.first_token.get(message.id), now)
        return state.chunk(message.id, delta, now, last=not state.decoders.keys() & self._states.keys())

    def _forget(self, state: RequestState) -> None:
        """Drop a request, and cancel its running sequences so that the engine frees their pages at once."""
        for sequence in state.decoders:
            if self._states.pop(sequence, None) is not None:
                if not state.refused:
                    self._metrics.cancelled()
                self._cancel(sequence)
        if state.adapter is not None:
            self.in_use.remove(state.adapter)

    def _cancel(self, sequence: str) -> None:
        self._engine.offer(CancelRequest(id=sequence))


def _values(message: Tokens) -> int:
    """Number of tokens and log-probabilities in a message, as `ITERATION_VALUES` counts them."""
    packed = len(message.logprobs.data) + len(message.prompt_logprobs.data)
    return len(message.tokens) + packed // BYTES_PER_TOP


def targets_of(request: GenerateRequest, config: Config, *, device: str, sheds: bool = True) -> Slo:
    """Return a request's latency targets: its own, otherwise those of its class. `device`: the base's. `sheds`: whether
    the request may be shed for its deadline."""
    batch = request.slo_class == "batch"
    ttft, tpot = (config.slo_batch_ttft, config.slo_batch_tpot) if batch else config.targets(device=device)
    sheds = sheds and not config.policy_class.in_batches
    every, explicit = sheds and config.shed == "all", sheds and config.shed == "explicit"
    return Slo(
        ttft=request.slo_ttft or ttft,
        tpot=request.slo_tpot or tpot,
        e2e=request.slo_e2e,
        batch=batch,
        shed=every or (explicit and (request.slo_class == "interactive" or request.slo_ttft is not None)),
        shed_e2e=(every or explicit) and request.slo_e2e is not None,
    )
