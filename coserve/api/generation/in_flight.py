"""Requests in flight: from a checked request to a stream of chunks, and an end for each whatever happens."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from coserve.api.engine_client import EngineClient
from coserve.api.generation.async_tokenizer import AsyncTokenizer
from coserve.api.generation.choice_decoder import ChoiceDecoder, ChoiceDelta
from coserve.api.generation.output_queue import EngineOutput, OutputQueue
from coserve.api.generation.prompts import check_generate, encode_prompt, sampling_params
from coserve.api.generation.turns import Turns
from coserve.api.generation.waiting_limit import WaitingLimit
from coserve.api.metrics.prometheus import Metrics
from coserve.config import Config
from coserve.errors import BaseMismatch, EngineUnavailable, QueueFull, error_from_code
from coserve.link import Admitted, CancelRequest, Generate, RequestFailed, Tokens
from coserve.logprobs import BYTES_PER_TOP
from coserve.names import split_ref
from coserve.pretrained.tokenizer import Tokenizer
from coserve.schemas import GenerateChunk, GenerateRequest, Timing, Usage
from coserve.state.records import AdapterRecord
from coserve.state.thread import RegistryThread
from coserve.types import AdapterRef, Slo

MAX_SCORING = 1 << 21
"""Most log-probabilities of prompts that the requests in flight may ask for, all together."""


TURN_VALUES = 4096
"""Tokens and log-probabilities that are made into chunks in one turn of the event loop: 5 to 10 ms with what follows."""


def _values(message: Tokens) -> int:
    """What `TURN_VALUES` counts."""
    packed = len(message.logprobs.data) + len(message.prompt_logprobs.data)
    return len(message.tokens) + packed // BYTES_PER_TOP


@dataclass
class RequestState:
    """One request in flight: its sequences, one a choice."""

    id: str
    adapter: AdapterRef | None
    prompt: tuple[int, ...]
    seed: int
    arrived: float
    decoders: dict[str, ChoiceDecoder]
    inbox: OutputQueue = field(default_factory=OutputQueue)
    admitted: float | None = None
    last: dict[str, float] = field(default_factory=dict)
    """When each sequence last gave tokens."""
    begun: dict[str, float] = field(default_factory=dict)
    """When each sequence gave its first token."""
    first: float | None = None

    def timing(self, now: float) -> Timing:
        queue = None if self.admitted is None else self.admitted - self.arrived
        return Timing(queue=queue, ttft=(self.first or now) - self.arrived, e2e=now - self.arrived)

    def usage(self) -> Usage:
        out = sum(decoder.count for decoder in self.decoders.values())
        return Usage(prompt_tokens=len(self.prompt), completion_tokens=out, total_tokens=len(self.prompt) + out)


class InFlightRequests:
    """All requests in flight. `clock` gives seconds for `timing`."""

    def __init__(
        self,
        config: Config,
        engine: EngineClient,
        registry: RegistryThread,
        tokenizer: Tokenizer,
        texts: AsyncTokenizer,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._engine, self._registry, self._tokenizer = config, engine, registry, tokenizer
        self._texts, self._metrics, self._clock = texts, metrics, clock
        self._runs: dict[str, RequestState] = {}
        """By the id of each sequence that has not ended."""
        self._turns = Turns(TURN_VALUES)
        self._places = WaitingLimit(config.max_queue, fair=config.fair)
        self._scoring = 0
        self._stopped: EngineUnavailable | None = None
        self.in_use: Counter[AdapterRef] = Counter()

    # ---- what the engine says

    def deliver(self, message: EngineOutput) -> None:
        """Hand a message to its request; one that was cancelled has nobody to hear it."""
        if (run := self._runs.get(message.id)) is not None:
            run.inbox.put(message)

    def fail_all(self, error: EngineUnavailable) -> None:
        """The engine is gone: every request in flight ends with this error."""
        for id, run in self._runs.items():
            run.inbox.put(RequestFailed(id=id, code=error.code, message=error.message))

    def stop(self, error: EngineUnavailable) -> None:
        """Every request in flight ends with this error, and so does every one that comes."""
        self._stopped = error
        self.fail_all(error)

    # ---- what a client asks

    async def stream(
        self, request: GenerateRequest, turns: asyncio.Semaphore | None = None
    ) -> AsyncGenerator[GenerateChunk, None]:
        """The chunks of all choices as they come. Closing it early frees what the request holds in the engine.

        `turns` bounds the chunks that several streams hold: one is made, and yielded, while the semaphore is held.

        Raises, before the first chunk only: `InvalidRequest`, `EmptyPrompt`, `PromptTooLong`, `AdapterNotFound`,
        `BaseMismatch`, `QueueFull`; at any time: `EngineUnavailable`.
        """
        arrived = self._clock()
        turns = asyncio.Semaphore() if turns is None else turns
        run: RequestState | None = None
        shown, scoring = False, 0
        name = None if request.adapter is None else split_ref(request.adapter)[0]
        places = self._take_places(name, request.n)
        try:
            check_generate(request, self._engine.spec)
            prompt = await encode_prompt(request, self._engine.spec, self._texts)
            record = await self._resolve(request.adapter)
            scoring = self._take_scoring(request, len(prompt))
            run = self._start(request, prompt, record, arrived)
            while run.decoders.keys() & self._runs.keys():
                message = await run.inbox.get()
                if isinstance(message, Tokens) and places:
                    places = self._give_places(name, places)
                async with turns:
                    if isinstance(message, Tokens):
                        await self._turns.take(_values(message))
                    if (chunk := self._take(run, message)) is not None:
                        if request.return_prompt_ids and not shown and chunk.index == 0:
                            chunk = msgspec.structs.replace(chunk, prompt_token_ids=list(prompt))
                            shown = True
                        yield chunk
        finally:
            self._give_places(name, places)
            self._scoring -= scoring
            if run is not None:
                self._end(run)

    def _take_places(self, adapter: str | None, count: int) -> int:
        try:
            self._places.acquire(adapter, count)
        except QueueFull:
            self._metrics.refused()
            raise
        return count

    def _take_scoring(self, request: GenerateRequest, tokens: int) -> int:
        count = 0 if request.prompt_logprobs is None else tokens * (request.prompt_logprobs + 1)
        if self._scoring + count > MAX_SCORING:
            self._metrics.refused()
            raise QueueFull("too many log-probabilities of prompts at once")
        self._scoring += count
        return count

    def _give_places(self, adapter: str | None, count: int) -> int:
        self._places.release(adapter, count)
        return 0

    async def _resolve(self, text: str | None) -> AdapterRecord | None:
        """The version that serves this request, to its end. Raises `AdapterNotFound`, `BaseMismatch`."""
        if text is None:
            return None
        name, version = split_ref(text)
        record = await self._registry(lambda registry: registry.adapter(name, version))
        if record.base_fingerprint != self._engine.spec.fingerprint:
            raise BaseMismatch(f"adapter {record.ref} belongs to another base, {record.base_name!r}", field="adapter")
        return record

    def _start(
        self, request: GenerateRequest, prompt: tuple[int, ...], record: AdapterRecord | None, arrived: float
    ) -> RequestState:
        """Send the sequences to the engine. Raises `EngineUnavailable`."""
        if self._stopped is not None:
            raise self._stopped
        adapter = None if record is None else record.ref
        id = f"gen-{secrets.token_hex(8)}"
        seed = secrets.randbits(31) if request.seed is None else request.seed
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        decoders = {
            f"{id}-{index}": ChoiceDecoder(
                self._tokenizer,
                prompt,
                stops=stops,
                stop_token_ids=request.stop_token_ids,
                min_tokens=request.min_tokens,
                logprobs=request.logprobs is not None,
                prompt_logprobs=index == 0 and request.prompt_logprobs is not None,
                include_stop=request.include_stop_str_in_output,
                skip_special=request.skip_special_tokens,
            )
            for index in range(request.n)
        }
        run = RequestState(id, adapter, prompt, seed, arrived, decoders)
        room = max(1, self._engine.room - len(prompt))
        config = self._config
        slo = Slo(ttft=request.slo_ttft or config.slo_ttft, tpot=request.slo_tpot or config.slo_tpot)
        for index, sequence in enumerate(decoders):
            sampling = sampling_params(request, index, seed, room)
            self._engine.send(
                Generate(
                    id=sequence,
                    prompt=prompt,
                    sampling=sampling,
                    adapter=adapter,
                    slo=slo,
                    cache_salt=request.cache_salt,
                    digests=None if record is None else record.digests,
                )
            )
            self._runs[sequence] = run
        if adapter is not None:
            self.in_use[adapter] += 1
        self._metrics.prompt(len(prompt))
        return run

    def _take(self, run: RequestState, message: EngineOutput) -> GenerateChunk | None:
        """What a message adds to the stream. Raises the error that it brings."""
        now = self._clock()
        if isinstance(message, Admitted):
            if run.admitted is None:
                run.admitted = now
                self._metrics.queued(now - run.arrived)
            return None
        if isinstance(message, RequestFailed):
            self._runs.pop(message.id, None)
            if message.code == QueueFull.code:
                self._metrics.refused()
            raise error_from_code(message.code, message.message, message.retry_after)
        if message.id not in self._runs:
            return None  # it ended by a stop text, and these were on their way
        piece = run.decoders[message.id].feed(message)
        if piece.token_ids:
            self._metrics.tokens(len(piece.token_ids), run.arrived, run.last.get(message.id), now)
            run.begun.setdefault(message.id, now)
            run.last[message.id] = now
            run.first = run.first or now
        if piece.finished is not None:
            del self._runs[message.id]
            if message.finished is None:  # a stop text: the engine does not know yet
                with suppress(EngineUnavailable):
                    self._engine.send(CancelRequest(id=message.id))
        return self._chunk(run, message.id, piece, now)

    def _chunk(self, run: RequestState, sequence: str, piece: ChoiceDelta, now: float) -> GenerateChunk:
        over = not run.decoders.keys() & self._runs.keys()
        if piece.finished is not None:
            self._metrics.finished(piece.finished, run.decoders[sequence].count, now - run.arrived)
            self._metrics.phases(run.admitted, run.begun.get(sequence), now)
        return GenerateChunk(
            id=run.id,
            adapter=run.adapter.id if run.adapter else None,
            version=run.adapter.version if run.adapter else None,
            seed=run.seed,
            index=list(run.decoders).index(sequence),
            text=piece.text,
            token_ids=list(piece.token_ids),
            finish_reason=piece.finished.value if piece.finished else None,
            stop_reason=piece.stop_reason,
            logprobs=None if piece.logprobs is None else list(piece.logprobs),
            prompt_logprobs=None if piece.prompt_logprobs is None else list(piece.prompt_logprobs),
            usage=run.usage() if over else None,
            timing=run.timing(now) if over else None,
        )

    def _end(self, run: RequestState) -> None:
        """Forget a request; what of it still runs is cancelled, so that its pages are free at once."""
        for sequence in run.decoders:
            if self._runs.pop(sequence, None) is not None:
                self._metrics.cancelled()
                with suppress(EngineUnavailable):
                    self._engine.send(CancelRequest(id=sequence))
        if run.adapter is not None:
            self.in_use[run.adapter] -= 1
            if not self.in_use[run.adapter]:
                del self.in_use[run.adapter]
