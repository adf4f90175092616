"""Prepares requests as they enter the batch: checks them, pins their adapters, and sets what they need there."""

from __future__ import annotations

from coserve.core.errors import InvalidRequest
from coserve.core.link.generation import Generate
from coserve.core.types import AdapterRef, BaseSpec
from coserve.generate.checks import allowed_tokens, check_fits_pool
from coserve.generate.grammars import Grammars
from coserve.generate.remote_adapters import check_fits_beside
from coserve.lora.store.store import AdapterStore
from coserve.memory.kv import KvCache
from coserve.memory.prefix import PageKeys
from coserve.queues.request import Request


class Preparation:
    """Prepares requests of one base, for one pool of pages."""

    def __init__(
        self, spec: BaseSpec, store: AdapterStore, kv: KvCache, grammars: Grammars | None, *, prefix_cache: bool
    ) -> None:
        """`grammars`, `prefix_cache`: see `Generator`."""
        self._spec, self._store, self._kv, self._grammars = spec, store, kv, grammars
        self._prefix_cache = prefix_cache and kv.states is None

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
        prefix, message = self._store.acquire(ref).prefix_tokens, request.message
        try:
            if prefix:
                request.precede(prefix)
                request.max_tokens = allowed_tokens(message, self._spec, prefix)
            check_fits_beside(request, ref, self._store, self._kv, prefix)
        except Exception:
            self._store.release(ref)
            raise

    def precede(self, request: Request, first: int) -> None:
        """Write the request's cartridge into its pages, from token `first` on."""
        assert request.adapter is not None, "expected the adapter that is the cartridge"
        self._kv.write_prefix(request.pages, self._store.host_weights(request.adapter).prefix, first)

    def _keys(self, request: Generate) -> PageKeys:
        return PageKeys(
            self._kv.page_tokens,
            base=self._spec.fingerprint,
            adapter=request.adapter,
            salt=request.cache_salt,
        )
