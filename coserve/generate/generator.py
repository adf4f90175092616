"""Generation: many requests, each with its adapter, one packed forward a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from typing import Protocol

import torch
from torch import Tensor

from coserve.adapter_store.pages import AdapterPages
from coserve.errors import EngineFault, InvalidRequest, failure_text
from coserve.generate.batch import Batch, pack
from coserve.generate.checks import allowed_tokens, check_room, no_token_error
from coserve.generate.sampling.sampler import Choice, NoToken, Row, choose
from coserve.generate.sampling.scoring import prompt_logprobs
from coserve.generate.schedule import Scheduler, Share
from coserve.generate.sequences import Sequence, plain
from coserve.kernels.lora.interface import LoraBackend
from coserve.link import MAX_PROMPT_LOGPROBS, Generate, RequestFailed, Tokens
from coserve.logprobs import PackedLogprobs
from coserve.memory.kv import KvCache
from coserve.memory.prefix import PageKeys
from coserve.model.base import Attention
from coserve.model.faults import contained
from coserve.model.lora import LoraBatch, LoraWeights
from coserve.types import AdapterRef, BaseSpec, FinishReason

log = logging.getLogger(__name__)


class RunsBase(Protocol):
    """What generation needs of `model.Base`."""

    @property
    def spec(self) -> BaseSpec: ...
    @property
    def device(self) -> torch.device: ...

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        *,
        lora: LoraBatch | None,
        keep: Tensor | None,
    ) -> Tensor: ...


class HoldsAdapters(Protocol):
    """What generation needs of `adapter_store.AdapterStore`: a version acquired stays in memory until released.

    It comes into the pool's pages when its request becomes active.
    """

    def acquire(self, ref: AdapterRef) -> LoraWeights: ...
    def release(self, ref: AdapterRef) -> None: ...


class Flight(Protocol):
    """A step under way (`runner.Flight`)."""

    @property
    def ready(self) -> tuple[Sequence, ...]: ...
    def land(self) -> list[Choice | NoToken]: ...


class RunsSteps(Protocol):
    """What generation needs of `runner.Runner`."""

    def launch(self, shares: Items[Share]) -> Flight: ...
    def forget(self, sequence: Sequence) -> None: ...
    def prepare(self) -> bool: ...


class Generator:
    """Requests come in with `add`, tokens come out of `step`; between steps requests may be added and cancelled.

    On CPU the tokens of a request depend on the request alone (prompt, parameters, seed, adapter version), bit for
    bit, whatever runs beside it and however often it was preempted. On CUDA they may differ in the last bits of logits.
    """

    def __init__(
        self,
        base: RunsBase,
        residency: HoldsAdapters,
        kv: KvCache,
        *,
        max_running: int,
        step_tokens: int,
        lora_backend: LoraBackend,
        prefix_cache: bool = True,
        runner: RunsSteps | None = None,
    ) -> None:
        """`step_tokens`: most tokens of a step; `max_running`: sequences that hold pages at once (no more than a step has
        tokens), further ones wait; `prefix_cache`: sequences of one adapter version that begin alike share pages; `runner`: runs the
        steps whose tokens it can choose, one step ahead of what the host has read."""
        assert max_running > 0, f"expected room for a sequence, got {max_running}"
        assert step_tokens > 0, f"expected room for a token, got {step_tokens}"
        self._base, self._residency, self._kv, self._lora_backend = base, residency, kv, lora_backend
        self._adapters = AdapterPages(kv.buffer)
        self._scheduler = Scheduler(kv, self._adapters, max_running=max_running, step_tokens=step_tokens)
        self._prefix_cache = prefix_cache
        self._runner = runner
        self._flight: Flight | None = None
        self._sequences: dict[str, Sequence] = {}
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
        return self._adapters.total

    @property
    def memory_peak(self) -> int:
        """The most bytes of the GPU's memory that torch has had, pages, base and training included; 0 on CPU."""
        device = self._base.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0

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
    def notes(self) -> tuple[str, ...]:
        """What runs slower than it could, and why."""
        return self._kv.notes

    def add(self, request: Generate) -> None:
        """Put a request in line. Its `max_tokens` is cut to what the context leaves after the prompt.

        Raises:
            EmptyPrompt: no prompt tokens.
            PromptTooLong: the prompt fills the context, or the request and its adapter could never fit the pool.
            InvalidRequest: an id that runs already, or a token id outside of the vocabulary.
            AdapterNotFound, AdapterError: what `AdapterStore.acquire` raises.
        """
        if request.id in self._sequences:
            raise InvalidRequest(f"expected a new request id, got {request.id!r}, which is running", field="id")
        max_tokens = allowed_tokens(request, self._base.spec)
        check_room(request, max_tokens, self._kv, beside=0)
        source = None if request.adapter is None else self._acquire(request.adapter, request, max_tokens)
        sampling = request.sampling
        ends = () if sampling.ignore_eos else self._base.spec.eos_token_ids
        sequence = Sequence(
            request,
            arrival=self._arrivals,
            source=source,
            max_tokens=max_tokens,
            stop_ids=frozenset((*sampling.stop_token_ids, *ends)),
            tokens=list(request.prompt),
            keys=self._keys(request) if self._prefix_cache else None,
        )
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence)

    def cancel(self, id: str) -> None:
        """Forget a request and free its pages at once; nothing happens if it has ended already."""
        sequence = self._sequences.get(id)
        if sequence is not None:
            self._end(sequence)

    def adopt(self, runner: RunsSteps) -> None:
        """From now on steps are run by `runner`, as if it had been there from the start."""
        assert self._runner is None, "expected steps to have no runner yet"
        self._runner = runner

    @torch.no_grad()
    def prepare(self) -> bool:
        """Some tenths of a second of work that a later step would have to do; False if nothing is left of it."""
        return self._runner is not None and self._runner.prepare()

    @torch.no_grad()
    def step(self) -> list[Tokens | RequestFailed]:
        """One iteration: a token for each running sequence, and chunks of prompts; one message per token or failure.

        A token that ends a sequence (end of sequence, stop id) is part of the output. With a runner the tokens are those
        of the step before, which ran meanwhile.
        """
        shares = self._scheduler.plan()
        ahead = [] if self._runner is None else [share for share in shares if plain(share.sequence)]
        flight = self._launch(ahead) if ahead else None
        messages = self.land()
        self._flight = flight
        rest = shares if self._runner is None else [share for share in shares if not plain(share.sequence)]
        for batch in pack(rest, backend=self._lora_backend, device=self._base.device):
            messages.extend(self._run(batch))
        return messages

    def _run(self, batch: Batch) -> list[Tokens | RequestFailed]:
        """One forward. What it raises ends the requests in it: nothing of it is in what the others share."""
        try:
            with contained(self._base.device):
                attention = self._kv.attention(batch.runs)
                logits_BV = self._base.forward(
                    batch.tokens_T, batch.positions_T, attention, lora=batch.lora, keep=batch.keep
                )
                return self._advance(batch, logits_BV)
        except EngineFault:
            raise
        except Exception as error:
            log.exception("requests %s: internal error", ", ".join(share.sequence.id for share in batch.shares))
            return [self._abort(share.sequence, error) for share in batch.shares]

    def _abort(self, sequence: Sequence, error: Exception) -> RequestFailed:
        """The end of a request whose step raised. Raises `EngineFault` if its pages cannot be given back."""
        try:
            if self._sequences.get(sequence.id) is sequence:  # else it ended in the step, and its last message is lost
                self._scheduler.disown(sequence)
                self._end(sequence)
        except Exception as broken:
            raise EngineFault("the pages of a request that failed cannot be given back") from broken
        code, message = failure_text(error)
        return RequestFailed(id=sequence.id, code=code, message=message)

    def _launch(self, shares: list[Share]) -> Flight:
        assert self._runner is not None, "steps are launched by a runner"
        flight = self._runner.launch(shares)
        for share in shares:
            share.sequence.computed += share.tokens
        for sequence in flight.ready:
            sequence.flying += 1
        return flight

    def land(self) -> list[Tokens | RequestFailed]:
        """Waits for the step under way, if there is one, and gives its tokens."""
        flight, self._flight = self._flight, None
        messages: list[Tokens | RequestFailed] = []
        if flight is None:
            return messages
        for sequence, choice in zip(flight.ready, flight.land(), strict=True):
            if self._sequences.get(sequence.id) is sequence:  # else it ended with the token before, or was cancelled
                sequence.flying -= 1
                messages.append(self._push(sequence, choice))
        return messages

    def _keys(self, request: Generate) -> PageKeys:
        return PageKeys(
            self._kv.page_tokens,
            base=self._base.spec.fingerprint,
            adapter=request.adapter,
            salt=request.cache_salt,
        )

    def _acquire(self, ref: AdapterRef, request: Generate, max_tokens: int) -> LoraWeights:
        source = self._residency.acquire(ref)
        try:
            check_room(request, max_tokens, self._kv, beside=self._adapters.pages(source))
        except Exception:
            self._residency.release(ref)
            raise
        return source

    def _advance(self, batch: Batch, logits_BV: Tensor) -> list[Tokens | RequestFailed]:
        """Account for what a forward computed, and choose the next tokens."""
        for share in batch.shares:
            share.sequence.computed += share.tokens
        messages = self._score(batch, logits_BV[len(batch.ready) :])
        if not batch.ready:
            return messages
        rows = [Row(s.sampling, s.request.prompt, s.output, s.barred()) for s in batch.ready]
        choices = zip(batch.ready, choose(logits_BV[: len(batch.ready)], rows), strict=True)
        # One whose prompt could not be scored has ended.
        return messages + [
            self._push(sequence, choice) for sequence, choice in choices if sequence.id in self._sequences
        ]

    def _score(self, batch: Batch, logits_KV: Tensor) -> list[Tokens | RequestFailed]:
        """Log-probabilities of the prompts that ask for them; the end of those that ask for nothing else."""
        messages: list[Tokens | RequestFailed] = []
        for score, entries in zip(batch.scores, prompt_logprobs(logits_KV, batch.scores), strict=True):
            score.sequence.scored += score.rows
            if entries is None:
                messages.append(self._fail(score.sequence, NoToken.NOT_FINITE))
            else:
                for first in range(0, len(entries), MAX_PROMPT_LOGPROBS):
                    some = PackedLogprobs.of(entries[first : first + MAX_PROMPT_LOGPROBS])
                    messages.append(Tokens(id=score.sequence.id, tokens=(), prompt_logprobs=some))
        for share in batch.shares:
            if not share.sequence.max_tokens and not share.sequence.pending and share.sequence.id in self._sequences:
                self._end(share.sequence)
                messages.append(Tokens(id=share.sequence.id, tokens=(), finished=FinishReason.LENGTH))
        return messages

    def _fail(self, sequence: Sequence, reason: NoToken) -> RequestFailed:
        if reason is NoToken.NOT_FINITE:
            self._scheduler.disown(sequence)
        self._end(sequence)
        error = no_token_error(sequence, reason)
        return RequestFailed(id=sequence.id, code=error.code, message=error.message)

    def _push(self, sequence: Sequence, choice: Choice | NoToken) -> Tokens | RequestFailed:
        if isinstance(choice, NoToken):
            return self._fail(sequence, choice)
        finished = sequence.push(choice.token)
        if finished is not None:
            self._end(sequence)
        logprobs = PackedLogprobs.of(() if choice.logprob is None else (choice.logprob,))
        return Tokens(id=sequence.id, tokens=(choice.token,), logprobs=logprobs, finished=finished)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        if self._runner is not None:
            self._runner.forget(sequence)
        self._scheduler.remove(sequence)
        if sequence.adapter is not None:
            self._residency.release(sequence.adapter)
