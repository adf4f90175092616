"""Prepares requests as they enter the batch: checks them, pins their adapters, and sets what they need there. After a
loss of LoRA servers, preempts the requests whose adapters these held."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from coserve.core.errors import AdapterTooLarge, CoserveError, InvalidRequest, LoraServerLost, PromptTooLong
from coserve.core.link.generation import Generate
from coserve.core.types import AdapterRef, BaseSpec
from coserve.generate.checks import allowed_tokens, check_fits_pool
from coserve.generate.grammars import Grammars
from coserve.generate.schedule import Scheduler
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.memory.prefix import PageKeys
from coserve.queues.request import Request, State

log = logging.getLogger(__name__)


class Preparation:
    """Prepares requests of one base, for one pool of pages."""

    def __init__(
        self, spec: BaseSpec, store: AdapterStore, kv: KvCache, grammars: Grammars | None, *, prefix_cache: bool
    ) -> None:
        self._spec, self._store, self._kv, self._grammars = spec, store, kv, grammars
        self._prefix_cache = prefix_cache

    def prepare(self, request: Request) -> None:
        """Check the request, pin its adapter in host memory, and set its limits. Raises as `Generator.add`."""
        message = request.message
        request.max_tokens = allowed_tokens(message, self._spec)
        check_fits_pool(message, request.max_tokens, self._kv, adapter_pages=0)
        if self._grammars is not None:
            request.constraint = self._grammars.matcher(message)
        elif message.grammar is not None or message.allowed_token_ids is not None or message.bad_words:
            raise InvalidRequest("expected no grammar, allowed_token_ids or bad_words: this engine enforces none")
        if message.adapter is not None:
            self._acquire(message.adapter, request)
        ends = () if message.sampling.ignore_eos else self._spec.eos_token_ids
        request.stop_ids = frozenset((*message.sampling.stop_token_ids, *ends))
        request.keys = self._keys(message) if self._prefix_cache else None

    def _acquire(self, ref: AdapterRef, request: Request) -> None:
        settings = self._store.acquire(ref).settings
        try:
            request.has_lora = not settings.cartridge
            if settings.prefix:
                request.precede(settings.prefix)
                request.max_tokens = allowed_tokens(request.message, self._spec, settings.prefix)
            check_fits_beside(request, ref, self._store, self._kv)
        except Exception:
            self._store.release(ref)
            raise

    def precede(self, request: Request, first: int) -> None:
        """Write the KV prefix of the request's adapter into its pages, from token `first` on."""
        assert request.adapter is not None, "expected the adapter that has the prefix"
        read = self._store.in_pages if request.has_lora else self._store.host_weights
        self._kv.write_prefix(request.pages, read(request.adapter).prefix, first)

    def _keys(self, request: Generate) -> PageKeys:
        return PageKeys(
            self._kv.page_tokens,
            base=self._spec.fingerprint,
            adapter=request.adapter,
            salt=request.cache_salt,
        )


def check_fits_beside(request: Request, ref: AdapterRef, store: AdapterStore, kv: KvCache) -> None:
    """Check that a request fits the pool next to its adapter, with the tokens of its KV prefix. Raises as
    `check_fits_pool` does; or `LoraServerLost`, if it would fit while LoRA servers held its experts' pairs."""
    pages = store.pages(ref) if request.has_lora else 0
    try:
        check_fits_pool(request.message, request.max_tokens, kv, adapter_pages=pages, prefix=request.prefix)
    except (AdapterTooLarge, PromptTooLong):
        if pages and store.least_pages(ref) < pages:
            message = f"the adapter {ref} does not fit into the engine's pages, and LoRA servers do not have it now"
            raise LoraServerLost(message, field="adapter") from None
        raise


def compute_here(scheduler: Scheduler, store: AdapterStore, kv: KvCache) -> Iterator[tuple[Request, CoserveError]]:
    """After a loss of LoRA servers, preempt the requests whose adapters these held: they are recomputed with the whole
    adapter in pages. Then yield each request that no longer fits the pool, with its error."""
    log.warning("LoRA servers were lost: the engine computes adapters of experts")
    active = [(each, each.paged_adapter) for each in scheduler.requests.values() if each.state is State.ACTIVE]
    own = [(request, ref) for request, ref in active if ref is not None]
    remote = [each for each, ref in own if each.pages and store.in_pages(ref).remote >= 0]
    scheduler.recompute(remote, always=True)
    for request, ref in own:
        try:
            check_fits_beside(request, ref, store, kv)
        except CoserveError as error:
            yield request, error
