"""What the content of a full KV page depends on, as a key.

Two pages have one key only if the base, the adapter, its version and every token up to the page's end are the same: the
key is a digest of the page before it and of the page's own tokens (vLLM calls it a block hash), 256 bits wide, so that
no two contents that anybody could make up share one. A new version of an adapter can therefore never find the pages of
an old one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from coserve.types import AdapterRef

DIGEST_BYTES = 32


class PageKeys:
    """The keys of one sequence's pages, computed as they are asked for and kept."""

    def __init__(self, page_tokens: int, *, base: str, adapter: AdapterRef | None, salt: str = "") -> None:
        """`base`: its fingerprint. `salt`: only requests with the same one share pages."""
        self._page_tokens = page_tokens
        whose = (base, salt, None if adapter is None else (adapter.id, adapter.version))
        self._root = blake2b(msgspec.msgpack.encode(whose), digest_size=DIGEST_BYTES).digest()
        self._keys: list[bytes] = []

    def first(self, pages: int, tokens: Sequence[int]) -> Sequence[bytes]:
        """Keys of the first `pages` pages of the sequence, whose tokens are `tokens`. They only ever grow at the end."""
        size = self._page_tokens
        assert pages * size <= len(tokens), f"expected {pages} full pages, got {len(tokens)} tokens"
        for page in range(len(self._keys), pages):
            parent = self._keys[-1] if self._keys else self._root
            own = array("q", tokens[page * size : (page + 1) * size]).tobytes()
            self._keys.append(blake2b(parent + own, digest_size=DIGEST_BYTES).digest())
        return self._keys[:pages]
