"""The `slora` strategy in training and eager steps: the ranks exchange the rank-r intermediates.

Other adapters of the step are computed locally. Compiled serving steps have kernels of their own (`exchange`,
`ShardedSlotLora`). S-LoRA (Sheng et al., MLSys '24), section 6, and figure 2 of the BD-LoRA paper. For sites that read
one input the intermediates of all adapters and sites travel in one collective, as in vLLM.

Letters: T tokens, W columns of an intermediate (the largest LoRA rank of a shard), N tensor-parallel ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.lora.interface import Adapters, CombinedLora, LoraBackend, PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, MainGrads, SiteGroup
from coserve.model.parallel.functions import gather_columns, sum_shared
from coserve.model.parallel.lora import FullyShardedPair
from coserve.model.parallel.modules import SiteShard


def prepare_lora(
    backend: LoraBackend,
    segments: Segments,
    adapters: Adapters,
    groups: Sequence[SiteGroup],
    shards: Mapping[str, SiteShard],
) -> PreparedLora:
    """Prepare the terms of this rank's shards of adapters. `shards`: by site.

    Without fully sharded pairs, this is `backend.prepare`.
    """
    if not shards:
        return backend.prepare(segments, adapters, groups)
    local, sharded = list[dict[str, LoraPair]](), list[dict[str, LoraPair]]()
    for index, adapter in enumerate(adapters):
        present = index in segments.runs
        local.append({s: pair for s, pair in adapter.items() if not isinstance(pair, FullyShardedPair)})
        sharded.append({s: pair for s, pair in adapter.items() if present and isinstance(pair, FullyShardedPair)})
    if not any(sharded):
        return backend.prepare(segments, local, groups)
    return RankLora(_Given(backend, local, sharded, groups, shards), segments)


@dataclass(frozen=True)
class _Given:
    """Inputs of `RankLora`: a backend, each adapter's local and fully sharded pairs, groups of sites, and shards."""

    backend: LoraBackend
    local: Sequence[Mapping[str, LoraPair]]
    sharded: Sequence[Mapping[str, LoraPair]]
    groups: Sequence[SiteGroup]
    shards: Mapping[str, SiteShard]

    def parts(self, segments: Segments, *, sums: bool) -> list[PreparedLora]:
        """Prepare the local terms, if there are any, and the fully sharded ones.

        `sums`: kernels add gradients to the pairs' `MainGrads`; otherwise autograd returns those of all pairs.
        """
        parts = list[PreparedLora]()
        if any(self.local):
            local = self.local if sums else [{s: _without_sums(pair) for s, pair in own.items()} for own in self.local]
            parts.append(self.backend.prepare(segments, local, self.groups))
        parts.append(FullyShardedLora(self.backend, segments, self.sharded, self.groups, self.shards, sums=sums))
        return parts


class RankLora(PreparedLora):
    """The terms of a step with fully sharded pairs, and possibly others."""

    def __init__(self, given: _Given, segments: Segments, learning: Sequence[PreparedLora] | None = None) -> None:
        """`learning`: terms for `terms_forward` and `terms_backward`, if they are prepared already."""
        self._given, self._segments, self._found = given, segments, learning
        pairs = [pair for own in (*given.local, *given.sharded) for pair in own.values()]
        self._sums = given.backend.groups_inputs and all(pair.main_grads is not None for pair in pairs)

    @cached_property
    def _differentiable(self) -> CombinedLora:
        return CombinedLora(self._given.parts(self._segments, sums=False))

    @cached_property
    def _learning(self) -> Sequence[PreparedLora]:
        return self._given.parts(self._segments, sums=self._sums) if self._found is None else self._found

    @property
    def sums_gradients(self) -> bool:
        return self._sums

    def changes(self, group: SiteGroup) -> bool:
        given = self._given
        return any(name in own for own in (*given.local, *given.sharded) for name in group.names)

    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        return self._differentiable.add(group, ys, x_TD)

    def for_batch(self, segments: Segments) -> RankLora | None:
        if not self._sums or segments.runs.keys() != self._segments.runs.keys():
            return None
        found = [part.for_batch(segments) for part in self._learning]
        known = [part for part in found if part is not None]
        return RankLora(self._given, segments, known) if len(known) == len(found) else None

    def terms_forward(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, keep: bool) -> list[object] | None:
        kept = [
            part.terms_forward(group, ys, x_TD, keep=keep) if part.changes(group) else None for part in self._learning
        ]
        return kept if keep else None

    def terms_backward(self, group: SiteGroup, dys: Sequence[Tensor], x_TD: Tensor, kept: object) -> Tensor:
        assert isinstance(kept, list), "expected what a forward kept"
        own = [(part, one) for part, one in zip(self._learning, kept, strict=True) if one is not None]
        first, *others = [part.terms_backward(group, dys, x_TD, one) for part, one in own]
        for dx_TD in others:
            first.add_(dx_TD)
        return first


class _Kept(NamedTuple):
    """Data kept for the backward of a group's fully sharded terms."""

    down: object
    up: Mapping[str, tuple[Tensor, object]]
    """For each site, its whole intermediate (T, X) and the data that the expand kept."""


class FullyShardedLora(PreparedLora):
    """The terms of fully sharded adapters, by two calls of a backend that computes `y + (x Aᵀ) Bᵀ`.

    The shrink uses the pairs' A and an identity for B; the expand uses an identity for A and the pairs' B.
    """

    def __init__(
        self,
        backend: LoraBackend,
        segments: Segments,
        adapters: Sequence[Mapping[str, LoraPair]],
        groups: Sequence[SiteGroup],
        shards: Mapping[str, SiteShard],
        *,
        sums: bool = False,
    ) -> None:
        """`sums`: for `terms_forward` and `terms_backward`, whose kernels add to the pairs' `MainGrads`; otherwise for
        `add`."""
        self._tokens, self._shards = segments.tokens, shards
        self._scratch: dict[tuple[int, int], Tensor] | None = {} if sums else None
        """Gradient sums of the identity matrices, by shape; never read."""
        names = {name for adapter in adapters for name in adapter}
        self._live = {group: [n for n in group.names if n in names] for group in groups}
        pairs = [pair for adapter in adapters for pair in adapter.values()]
        self._width = max(pair.a_RD.shape[0] for pair in pairs)
        down = [{n: self._down(pair) for n, pair in adapter.items()} for adapter in adapters]
        up = [{n: self._up(pair, shards[n]) for n, pair in adapter.items()} for adapter in adapters]
        self._down_groups = {group: SiteGroup(tuple(live)) for group, live in self._live.items() if live}
        self._up_groups = {name: SiteGroup((name,)) for name in names}
        self._shrink = backend.prepare(segments, down, list(self._down_groups.values()))
        self._expand = backend.prepare(segments, up, list(self._up_groups.values()))

    def changes(self, group: SiteGroup) -> bool:
        return bool(self._live.get(group))

    def for_batch(self, segments: Segments) -> FullyShardedLora | None:
        shrink, expand = self._shrink.for_batch(segments), self._expand.for_batch(segments)
        if shrink is None or expand is None:
            return None
        other = copy.copy(self)
        other._tokens, other._shrink, other._expand = segments.tokens, shrink, expand
        return other

    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        out = list(ys)
        live = self._live.get(group)
        if not live:
            return out
        shard = self._shards[live[0]]
        parts = self._shrink.add(self._down_groups[group], self._empty(x_TD, live), x_TD)
        h = torch.cat(parts, 1)
        h = sum_shared(h, shard.mesh) if shard.partition.sums else gather_columns(h, shard.mesh, shared=True)
        for name, h_TX in self._by_site(h, live).items():
            at = group.names.index(name)
            out[at] = self._added(name, out[at], h_TX)
        return out

    def terms_forward(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, keep: bool) -> _Kept | None:
        live = self._live[group]
        shard, parts = self._shards[live[0]], self._empty(x_TD, live)
        down = self._shrink.terms_forward(self._down_groups[group], parts, x_TD, keep=keep)
        h = torch.cat(parts, 1)
        h = shard.mesh.all_reduce(h) if shard.partition.sums else shard.mesh.all_gather(h)
        up = {}
        for name, h_TX in self._by_site(h, live).items():
            y_TO = self._own_outputs(name, ys[group.names.index(name)])
            delta = torch.zeros_like(y_TO, memory_format=torch.contiguous_format)
            up[name] = h_TX, self._expand.terms_forward(self._up_groups[name], [delta], h_TX, keep=keep)
            y_TO.add_(delta)
        return _Kept(down, up) if keep else None

    def terms_backward(self, group: SiteGroup, dys: Sequence[Tensor], x_TD: Tensor, kept: object) -> Tensor:
        assert isinstance(kept, _Kept), "expected what a forward kept"
        live = self._live[group]
        shard = self._shards[live[0]]
        found = []
        for name, (h_TX, own) in kept.up.items():
            dy_TO = self._own_outputs(name, dys[group.names.index(name)])
            dh_TX = self._expand.terms_backward(self._up_groups[name], [dy_TO], h_TX, own)
            found.append(dh_TX.view(self._tokens, -1, 1, self._width))
        dh = shard.mesh.all_reduce(torch.cat(found, 2).view(self._tokens, -1))
        if not shard.partition.sums:
            dh = dh.chunk(shard.mesh.size, 1)[shard.mesh.rank]
        parts = [part.contiguous() for part in torch.split(dh, self._width, 1)]
        return self._shrink.terms_backward(self._down_groups[group], parts, x_TD, kept.down)

    def _empty(self, x_TD: Tensor, live: Sequence[str]) -> list[Tensor]:
        """Allocate an intermediate (T, W) for each of these sites."""
        return [x_TD.new_zeros(self._tokens, self._width) for _ in live]

    def _by_site(self, h: Tensor, live: Sequence[str]) -> dict[str, Tensor]:
        """Split the gathered intermediates by site, (T, X) each.

        `h` has the ranks' shards in order, and each shard has the columns of all sites.
        """
        h_TNSW = h.view(self._tokens, -1, len(live), self._width)
        return {name: h_TNSW[:, :, place].reshape(self._tokens, -1) for place, name in enumerate(live)}

    def _own_outputs(self, name: str, y_TO: Tensor) -> Tensor:
        """Return a view of the outputs whose terms this rank computes."""
        shard = self._shards[name]
        if not shard.partition.sums:
            return y_TO
        outputs = y_TO.shape[1] // shard.mesh.size
        return y_TO.narrow(1, shard.mesh.rank * outputs, outputs)

    def _added(self, name: str, y_TO: Tensor, h_TX: Tensor) -> Tensor:
        """Return `y` plus the terms of a site: for all its outputs on this rank, or only for those that this rank
        computes."""
        shard, group = self._shards[name], self._up_groups[name]
        if not shard.partition.sums:
            return self._expand.add(group, [y_TO], h_TX)[0]
        outputs = y_TO.shape[1] // shard.mesh.size
        start = shard.mesh.rank * outputs
        (delta,) = self._expand.add(group, [h_TX.new_zeros(self._tokens, outputs)], h_TX)
        return y_TO + pad(delta, (start, y_TO.shape[1] - start - outputs))

    def _down(self, pair: LoraPair) -> LoraPair:
        """Return the pair that computes x aᵀ in the first columns of an intermediate."""
        picks = _identity(self._width, pair.a_RD.shape[0], pair.a_RD)
        return LoraPair(pair.a_RD, picks, 1.0, self._sums(pair, None, picks))

    def _up(self, pair: LoraPair, shard: SiteShard) -> LoraPair:
        """Return the pair that computes terms from the intermediate. In a gathered one the ranks' shards are `width`
        columns apart."""
        rank = pair.b_OR.shape[1]
        part = pair.a_RD.shape[0]
        picks = _identity(part, self._width, pair.b_OR)
        if not shard.partition.sums:
            picks = torch.block_diag(*[picks] * (rank // part))  # type: ignore[no-untyped-call]
        return LoraPair(picks, pair.b_OR, pair.scaling, self._sums(pair, picks, None))

    def _sums(self, pair: LoraPair, a: Tensor | None, b: Tensor | None) -> MainGrads | None:
        """Return the pair's gradient sums, with scratch in place of those of `a` or `b`, whichever is the identity."""
        if self._scratch is None:
            return None
        assert pair.main_grads is not None, "expected pairs with sums of gradients"
        own = pair.main_grads
        return MainGrads(own.a_RD if a is None else self._unread(a), own.b_OR if b is None else self._unread(b))

    def _unread(self, like: Tensor) -> Tensor:
        assert self._scratch is not None, "expected pairs with sums of gradients"
        shape = like.shape[0], like.shape[1]
        if shape not in self._scratch:
            self._scratch[shape] = torch.zeros(shape, device=like.device)
        return self._scratch[shape]


def _without_sums(pair: LoraPair) -> LoraPair:
    return pair if pair.main_grads is None else replace(pair, main_grads=None)


def _identity(rows: int, columns: int, like: Tensor) -> Tensor:
    return torch.eye(rows, columns, dtype=like.dtype, device=like.device)
