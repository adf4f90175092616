"""Copies of adapters' weights as the dense operands of block-sparse products, kept across steps.

At each site the A of all adapters lie in one tensor (R, D) and their scaled B in another (R, O). An adapter has the
same rows at all sites: whole blocks, padded with zeros. It is copied once at each site, when the site first runs, and
again only if its tensors have changed since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from coserve.kernels.lora.types import LoraPair

NARROW, WIDE = 32, 64
"""An adapter's rows are a multiple of `NARROW`, or of `WIDE` if its rank exceeds `NARROW`: whole blocks of either
size."""
CAPACITY = 128
"""Operands that are kept across steps have a multiple of this many rows, so that every block size divides them."""


class Rows(NamedTuple):
    """Rows of one adapter in every operand."""

    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


class Operands(NamedTuple):
    """All adapters at one site, both contiguous. Columns are padded to whole blocks."""

    a_RD: Tensor  # noqa: N815
    b_RO: Tensor  # noqa: N815


@dataclass(eq=False)
class _Adapter:
    """An adapter with rows. It is recognised by its first pair, which is held, so that its id is not reused."""

    site: str
    pair: LoraPair
    rows: Rows
    copied: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Sites at which it was copied, with the versions of A and B."""


class KeptWeights:
    """Operands of a changing set of adapters, on one stream. Unused adapters stay until their rows are needed."""

    def __init__(self, block: int | None = None, limit: int | None = None) -> None:
        """`block`: rows are multiples of it; None: see `NARROW`. `limit`: most bytes of all operands; None: no
        limit."""
        self._block, self._limit = block, limit
        self._adapters = OrderedDict[int, _Adapter]()
        """Adapters by the id of their first pair, least recently used first."""
        self._operands = dict[str, Operands]()
        self._row_bytes = dict[str, int]()
        """Bytes of a row at each site."""
        self._capacity = 0
        self.generation = 0
        """Changes whenever an adapter loses its rows, or operands are replaced."""

    @property
    def capacity(self) -> int:
        """Rows R of the operands."""
        return self._capacity

    @property
    def bytes(self) -> int:
        """Bytes of the operands of all sites that were placed, whether they are allocated yet or not."""
        return self._capacity * sum(self._row_bytes.values())

    def place(self, adapters: Sequence[Mapping[str, LoraPair]]) -> list[Rows] | None:
        """Return each adapter's rows, none for an adapter without pairs. None if all together exceed the limit."""
        first = [next(iter(adapter.items()), None) for adapter in adapters]
        wanted = {id(own[1]) for own in first if own is not None}
        for key in wanted & self._adapters.keys():
            self._adapters.move_to_end(key)
        found = list[Rows]()
        for adapter, own in zip(adapters, first, strict=True):
            if own is None:
                found.append(Rows(0, 0))
                continue
            key = id(own[1])
            if key not in self._adapters:
                rows = self._allocate(adapter, wanted)
                if rows is None:
                    return None
                self._adapters[key] = _Adapter(*own, rows)
            found.append(self._adapters[key].rows)
        return found

    def forget(self, sites: Mapping[str, LoraPair]) -> None:
        """Drop an adapter, whose memory will be reused."""
        for key, own in [*self._adapters.items()]:
            if sites.get(own.site) is own.pair:
                self._drop(key)

    def operands(self, site: str, adapters: Sequence[Mapping[str, LoraPair]], like: Sequence[LoraPair]) -> Operands:
        """Return the site's operands, in which these adapters are up to date. `like`: their dense pairs, in order."""
        operands = self._operands.get(site)
        if operands is None:
            a_RD, b_OR = like[0].a_RD, like[0].b_OR
            sizes = self._padded(a_RD.shape[1]), self._padded(b_OR.shape[0])
            operands = self._operands[site] = Operands(*(a_RD.new_zeros(self._capacity, size) for size in sizes))
        for adapter, pair in zip(adapters, like, strict=True):
            own, kept = self._adapters[id(next(iter(adapter.values())))], adapter[site]
            versions = _version(kept.a_RD), _version(kept.b_OR)
            if own.copied.get(site) != versions:
                _copy(pair, operands, own.rows)
                own.copied[site] = versions
        return operands

    def _allocate(self, adapter: Mapping[str, LoraPair], wanted: set[int]) -> Rows | None:
        """Find rows for a new adapter: free ones, else by enlarging the operands, else by evicting adapters not in
        `wanted`."""
        rank = max(pair.rank for pair in adapter.values())
        unit = self._block or (NARROW if rank <= NARROW else WIDE)
        count = rank + -rank % unit
        for site, pair in adapter.items():
            columns = self._padded(pair.a_RD.shape[1] * pair.a_blocks) + self._padded(pair.b_OR.shape[0])
            self._row_bytes[site] = columns * pair.a_RD.element_size()
        if self._limit is not None and self.bytes > self._limit:  # adapters with more sites than those before
            self._clear()
            return None
        while (first := self._free(count, unit)) is None:
            if not self._grow(count):
                unused = next((key for key in self._adapters if key not in wanted), None)
                if unused is None:
                    return None
                self._drop(unused)
        return Rows(first, count)

    def _free(self, count: int, unit: int) -> int | None:
        first = 0
        for own in sorted(own.rows for own in self._adapters.values()):
            if first + count <= own.first:
                break
            first = own.end + -own.end % unit
        return first if first + count <= self._capacity else None

    def _grow(self, count: int) -> bool:
        """Enlarge the operands for `count` more rows, as far as the limit allows; return False if they cannot grow.
        Adapters are copied again when they are next used."""
        wanted = self._capacity + count
        if self._limit is not None:  # twice the rows, as other adapters will follow
            most = self._limit // sum(self._row_bytes.values())
            wanted = max(CAPACITY, 2 * self._capacity, wanted + -wanted % CAPACITY)
            wanted = min(wanted, most - most % CAPACITY)
        if wanted <= self._capacity:
            return False
        self._capacity = wanted
        self._operands.clear()
        for own in self._adapters.values():
            own.copied.clear()
        self.generation += 1
        return True

    def _clear(self) -> None:
        self._adapters.clear()
        self._operands.clear()
        self._capacity = 0
        self.generation += 1

    def _padded(self, columns: int) -> int:
        return columns + -columns % (self._block or WIDE)

    def _drop(self, key: int) -> None:
        del self._adapters[key]
        self.generation += 1


def _version(weight: Tensor) -> int:
    """Return a number that changes with a trained tensor's contents. Tensors that are not trained do not change; their
    memory may belong to a larger tensor that does."""
    return weight._version if weight.requires_grad else 0


@torch.no_grad()
def _copy(pair: LoraPair, operands: Operands, rows: Rows) -> None:
    a_RD, b_RO = (each[rows.first : rows.end] for each in operands)
    rank, inputs, outputs = pair.rank, pair.a_RD.shape[1], pair.b_OR.shape[0]
    a_RD[:rank, :inputs].copy_(pair.a_RD)
    torch.mul(pair.b_OR.t(), pair.scaling, out=b_RO[:rank, :outputs])
    if rank < rows.size:
        a_RD[rank:].zero_()
        b_RO[rank:].zero_()
