"""Keys of full KV pages for the prefix cache: vLLM's block hashes.

A page's key is a digest of the previous page's key and of the page's own tokens; the first one depends on the base, the
adapter and its version. So pages with equal keys have equal contents, and a new version of an adapter never finds the
pages of an old one. 256 bits, so that nobody can construct a collision.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from coserve.core.types import AdapterRef

DIGEST_BYTES = 32


class PageKeys:
    """The keys of one sequence's pages, computed on demand and cached."""

    def __init__(self, page_tokens: int, *, base: str, adapter: AdapterRef | None, salt: str = "") -> None:
        """`base`: the base's fingerprint. `salt`: only requests with the same salt share pages."""
        self._page_tokens = page_tokens
        owner = (base, salt, None if adapter is None else (adapter.id, adapter.version))
        self._root = blake2b(msgspec.msgpack.encode(owner), digest_size=DIGEST_BYTES).digest()
        self._keys: list[bytes] = []

    def first(self, pages: int, tokens: Sequence[int]) -> Sequence[bytes]:
        """Return the keys of the sequence's first `pages` pages.

        `tokens`: all its tokens so far, an extension of the tokens of earlier calls.
        """
        size = self._page_tokens
        assert pages * size <= len(tokens), f"expected {pages} full pages, got {len(tokens)} tokens"
        for page in range(len(self._keys), pages):
            parent = self._keys[-1] if self._keys else self._root
            own = array("q", tokens[page * size : (page + 1) * size]).tobytes()
            self._keys.append(blake2b(parent + own, digest_size=DIGEST_BYTES).digest())
        return self._keys[:pages]
