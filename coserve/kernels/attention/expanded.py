"""Attention of long prompt chunks over a cache of latents (`KvShape.latent`) by keys and values of all heads.

Absorbed (`model.latent.absorbed`), a query head meets L + P and L numbers of each token instead of the N + P and E of
its own key and value: 3.4 times the FLOPs with DeepSeek-V2's sizes. A step with a few new tokens of a sequence is bound
by reading its pages, and absorbs. For a long chunk it is faster to make the keys and values of its whole context first,
in temporary pages that all layers use one after the other.

Letters: those of `model.latent.absorbed`; C rows of long chunks, J tokens of the pages of their contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from coserve.kernels.attention.interface import (
    Attention,
    AttentionParams,
    KvShape,
    PagedStep,
    Pages,
    TokenRun,
    as_cached,
)
from coserve.kernels.gpu.device import to_device
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.latent import HeadSizes
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import SiteGroup

EXPANDED_TOKENS = 512
"""New tokens of a sequence from which on a step expands the latents of its context."""
EXPANDED_BYTES = 1 << 30
"""Most bytes of a layer's expanded keys and values. Chunks with contexts beyond it absorb."""


@dataclass(frozen=True)
class StepTerms:
    """A step's adapters, to prepare their terms for other rows than the step's: `prepare` takes segments with the same
    adapters as `segments`."""

    segments: Segments
    prepare: Callable[[Segments], PreparedLora]

    def of(self, first_rows: Sequence[int], lengths: Sequence[int]) -> PreparedLora:
        """Return the terms of rows with the adapters of these rows of the step, `lengths[i]` times that of
        `first_rows[i]`."""
        places = np.searchsorted(self.segments.bounds, first_rows, side="right") - 1
        adapters = tuple(self.segments.adapters[place] for place in places)
        return self.prepare(Segments((0, *accumulate(lengths)), adapters))


def most_expanded(shapes: Iterable[KvShape]) -> int:
    """Return the most tokens of contexts that a step expands; 0: it expands none."""
    each = max(shape.expanded for shape in shapes)
    return EXPANDED_BYTES // each if each else 0


def is_long(run: TokenRun) -> bool:
    """Whether a step expands the context of a run, if memory lasts."""
    return run.tokens >= EXPANDED_TOKENS


def long_chunks(runs: Sequence[TokenRun], most: int) -> list[int]:
    """Return the indices of the runs whose contexts are expanded, of at most `most` tokens together."""
    found = list[int]()
    for index, run in enumerate(runs):
        context = run.position + run.tokens
        if is_long(run) and context <= most:
            found.append(index)
            most -= context
    return found


class ExpandedAttention:
    """Attention of a step with long prompt chunks over latents. Built once a step.

    Layers of latents use `attend_chunks` for the rows `rows`, and `others` for `other_rows`, those of all other runs,
    packed from 0 on. `attend` is there for other layers.
    """

    reads_pages = True

    def __init__(
        self,
        pages: Pages,
        runs: Sequence[TokenRun],
        long: Sequence[int],
        paged: Callable[[Pages, Sequence[TokenRun]], PagedStep],
        terms: StepTerms | None,
    ) -> None:
        """`long`: from `long_chunks`; `paged`: makes the attention of other steps; `terms`: None: no adapters."""
        self.expanded = self
        self._pages, self._runs, self._paged, self._terms = pages, runs, paged, terms
        firsts = list(accumulate((run.tokens for run in runs), initial=0))
        self._firsts = [firsts[index] for index in long]
        self._chunks = [runs[index] for index in long]
        self._other_firsts = [first for index, first in enumerate(firsts[:-1]) if index not in long]
        self._others = [run for index, run in enumerate(runs) if index not in long]
        self.others = paged(pages, self._others) if self._others else None
        size = pages.keys[0].shape[1]
        held = [run.pages[: -(-(run.position + run.tokens) // size)] for run in self._chunks]
        self._counts = [len(own) for own in held]
        at = [np.arange(run.position, run.position + run.tokens) for run in self._chunks]
        rows = _rows(self._firsts, self._chunks), _rows(self._other_firsts, self._others)
        columns = [
            np.concatenate([np.array(own)[positions // size] for own, positions in zip(held, at, strict=True)]),
            np.concatenate(at) % size,
            np.concatenate(held),
            *rows,
        ]
        whole = to_device(torch.from_numpy(np.concatenate(columns)), pages.keys[0].device)
        *self._new, self._held, own, others = torch.split(whole, [len(column) for column in columns])
        self.rows, self.other_rows = (_index(*both) for both in zip(rows, (own, others), strict=True))
        self._temporary: dict[tuple[int, ...], tuple[Pages, PagedStep]] = {}

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        """See `Attention.attend`."""
        return self._paged(self._pages, self._runs).attend(layer, q_HTD, k_KTD, v_KTD, params)

    @cached_property
    def other_terms(self) -> PreparedLora:
        """The terms of `other_rows`, in a step with adapters."""
        assert self._terms is not None, "expected the terms of a step with adapters"
        return self._terms.of(self._other_firsts, [run.tokens for run in self._others])

    @cached_property
    def _context_terms(self) -> PreparedLora:
        assert self._terms is not None, "expected the terms of a step with adapters"
        size = self._pages.keys[0].shape[1]
        return self._terms.of(self._firsts, [size * count for count in self._counts])

    def attend_chunks(
        self,
        layer: int,
        q_HTD: Tensor,
        k_1TD: Tensor,
        weight_HOL: Tensor,
        sizes: HeadSizes,
        group: SiteGroup | None,
        params: AttentionParams,
    ) -> Tensor:
        """Write the chunks' latents into their pages, and return their rows (C, H, E). All rows of q, not absorbed, and
        of k are given. `group`: of `kv_b_proj`, if an adapter changes it."""
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        # Before other kernels: a LoRA kernel reads its plan before the preceding kernel has ended.
        terms = None if group is None else self._context_terms
        keys.index_put_(tuple(self._new), as_cached(k_1TD[:, self.rows].transpose(0, 1), keys.dtype))
        latents_JL = values[self._held].to(q_HTD.dtype).flatten(0, 2)
        y_JO = linear(latents_JL, weight_HOL.flatten(0, 1))
        if group is not None and terms is not None:
            terms.add_(group, [y_JO], latents_JL)
        temporary, paged = self._temporary_pages(q_HTD, sizes)
        keys_JHD, values_JHE = temporary.keys[0][:-1], temporary.values[0][:-1]
        y_JHO = y_JO.view(*keys_JHD.shape[:3], -1)
        keys_JHD[..., : sizes.nope].copy_(y_JHO[..., : sizes.nope])
        keys_JHD[..., sizes.nope :].copy_(keys[..., values.shape[3] :][self._held])
        values_JHE.copy_(y_JHO[..., sizes.nope :])
        return paged.read(0, q_HTD[:, self.rows], params)

    def _temporary_pages(self, q_HTD: Tensor, sizes: HeadSizes) -> tuple[Pages, PagedStep]:
        """Return pages for one layer's expanded keys and values, and the attention of the chunks over them."""
        (heads, _, width), count, size = q_HTD.shape, sum(self._counts), self._pages.keys[0].shape[1]
        if (kind := (heads, width, sizes.value)) not in self._temporary:
            parts = [size * heads * width, size * heads * sizes.value]
            keys, values = torch.split(q_HTD.new_zeros(count + 1, sum(parts)), parts, 1)
            keys, values = (own.view(count + 1, size, heads, -1) for own in (keys, values))
            pages = Pages((keys,), (values,))
            ends = pairwise(accumulate(self._counts, initial=0))
            runs = [
                TokenRun(run.tokens, run.position, tuple(range(*own)))
                for run, own in zip(self._chunks, ends, strict=True)
            ]
            self._temporary[kind] = pages, self._paged(pages, runs)
        return self._temporary[kind]


def _rows(firsts: Sequence[int], runs: Sequence[TokenRun]) -> NDArray[np.int64]:
    """Return the rows of runs that begin at these rows."""
    rows = [np.arange(first, first + run.tokens) for first, run in zip(firsts, runs, strict=True)]
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def _index(rows: NDArray[np.int64], sent: Tensor) -> slice | Tensor:
    """Return an index of these rows, which does not copy them if they are neighbours. `sent`: the rows on the
    device."""
    first, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    return slice(first, end) if end - first == len(rows) else sent


def expanded_of(attention: Attention) -> ExpandedAttention | None:
    """Return the `ExpandedAttention` of a step, which may be wrapped; None: the step absorbs."""
    return getattr(attention, "expanded", None)
