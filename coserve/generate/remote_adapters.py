"""Requests whose adapters' pairs of experts LoRA servers hold: their places in the page pool, and the loss of a
server."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from coserve.core.errors import AdapterTooLarge, CoserveError, LoraServerLost, PromptTooLong
from coserve.core.types import AdapterRef
from coserve.generate.checks import check_fits_pool
from coserve.generate.schedule import Scheduler
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.queues.request import Request, State

log = logging.getLogger(__name__)


def check_fits_beside(request: Request, ref: AdapterRef, store: AdapterStore, kv: KvCache, prefix: int = 0) -> None:
    """Check that a request fits the pool next to its adapter, or next to its cartridge of `prefix` tokens. Raises as
    `check_fits_pool`, and `LoraServerLost` if it would fit were its experts' pairs at LoRA servers."""
    pages = 0 if prefix else store.pages(ref)
    try:
        check_fits_pool(request.message, request.max_tokens, kv, adapter_pages=pages, prefix=prefix)
    except (AdapterTooLarge, PromptTooLong):
        if pages and store.least_pages(ref) < pages:
            message = f"the adapter {ref} does not fit into the engine's pages, and LoRA servers do not have it now"
            raise LoraServerLost(message, field="adapter") from None
        raise


def compute_here(scheduler: Scheduler, store: AdapterStore, kv: KvCache) -> Iterator[tuple[Request, CoserveError]]:
    """After a loss of LoRA servers, put requests back whose adapters they had, so that they are computed again with
    whole adapters in pages. Then yield each that cannot be, with its error."""
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
