"""Adapters in memory for generators in tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from coserve.core.errors import AdapterNotFound
from coserve.core.types import AdapterDigests, AdapterRef
from coserve.lora.store.packing import packed_bytes
from coserve.lora.store.store import AdapterStore
from coserve.model.lora import LoraWeights


def named(adapters: Iterable[LoraWeights]) -> dict[AdapterRef, LoraWeights]:
    """Each under a name of its own."""
    return {AdapterRef(f"a{i}", 1): weights for i, weights in enumerate(adapters)}


class Shelf:
    """Adapters, and by whom they are held. Each generator has a store of its own, of `stores`."""

    def __init__(self, weights: Mapping[AdapterRef, LoraWeights] | None = None) -> None:
        self.weights = dict(weights or {})
        self.largest = max(map(packed_bytes, self.weights.values()), default=0)
        self.held: Counter[AdapterRef] = Counter()
        self.stores = list[AdapterStore]()

    def store(self) -> AdapterStore:
        self.stores.append(_Counted(self))
        return self.stores[-1]

    def load(self, ref: AdapterRef, digests: AdapterDigests | None) -> LoraWeights:
        if ref not in self.weights:
            raise AdapterNotFound(f"no adapter {ref}")
        return self.weights[ref]


class _Counted(AdapterStore):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf.load, 1 << 40)
        self._shelf = shelf

    def acquire(self, ref: AdapterRef) -> LoraWeights:
        weights = super().acquire(ref)
        self._shelf.held[ref] += 1
        return weights

    def release(self, ref: AdapterRef) -> None:
        super().release(ref)
        self._shelf.held[ref] -= 1
