"""`slora` in training and eager steps: terms whose rank-r intermediates travel between the ranks. A step's other adapters stay as they are.
Compiled steps have kernels of their own for it (`exchange`, `ShardedSlotLora`).

S-LoRA (Sheng et al., MLSys '24), section 6, and figure 2 of the BD-LoRA paper. For sites that read one input the intermediates
of all adapters and sites travel in one collective, as in vLLM.

Letters: T tokens, W columns of an intermediate (the largest rank of a part), N ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from coserve.kernels.lora.interface import Adapters, CombinedLora, LoraBackend, PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, SiteGroup
from coserve.parallel.functions import gather_shared, sum_shared
from coserve.parallel.lora import FullyShardedPair
from coserve.parallel.modules import SiteShard


def prepare_lora(
    backend: LoraBackend,
    segments: Segments,
    adapters: Adapters,
    groups: Sequence[SiteGroup],
    shards: Mapping[str, SiteShard],
) -> PreparedLora:
    """`backend.prepare` of the ranks' parts of adapters; `shards`: by site. Without fully sharded pairs it is the backend's own."""
    local, sharded = list[dict[str, LoraPair]](), list[dict[str, LoraPair]]()
    for index, adapter in enumerate(adapters):
        present = index in segments.runs
        local.append({s: pair for s, pair in adapter.items() if not isinstance(pair, FullyShardedPair)})
        sharded.append({s: pair for s, pair in adapter.items() if present and isinstance(pair, FullyShardedPair)})
    if not any(sharded):
        return backend.prepare(segments, local, groups)
    parts = backend.prepare(segments, local, groups), FullyShardedLora(backend, segments, sharded, groups, shards)
    return CombinedLora(parts)


class FullyShardedLora(PreparedLora):
    """The terms of fully sharded adapters, by a backend that computes `y + (x Aᵀ) Bᵀ`: once with B, once with A an identity."""

    def __init__(
        self,
        backend: LoraBackend,
        segments: Segments,
        adapters: Sequence[Mapping[str, LoraPair]],
        groups: Sequence[SiteGroup],
        shards: Mapping[str, SiteShard],
    ) -> None:
        self._tokens, self._shards = segments.tokens, shards
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

    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        out = list(ys)
        live = self._live.get(group)
        if not live:
            return out
        shard = self._shards[live[0]]
        empty = [x_TD.new_zeros(self._tokens, self._width) for _ in live]
        parts = self._shrink.add(self._down_groups[group], empty, x_TD)
        h = torch.cat(parts, 1)
        h = sum_shared(h, shard.mesh) if shard.partition.sums else gather_shared(h, shard.mesh)
        # Gathered: each rank's columns of all sites, side by side.
        h_TNSW = h.view(self._tokens, -1, len(live), self._width)
        for place, name in enumerate(live):
            h_TX = h_TNSW[:, :, place].reshape(self._tokens, -1)
            at = group.names.index(name)
            out[at] = self._added(name, out[at], h_TX)
        return out

    def _added(self, name: str, y_TO: Tensor, h_TX: Tensor) -> Tensor:
        """`y` with the terms of a site: of all its outputs here, or of the rank's part of them."""
        shard, group = self._shards[name], self._up_groups[name]
        if not shard.partition.sums:
            return self._expand.add(group, [y_TO], h_TX)[0]
        outputs = y_TO.shape[1] // shard.mesh.size
        start = shard.mesh.rank * outputs
        (delta,) = self._expand.add(group, [h_TX.new_zeros(self._tokens, outputs)], h_TX)
        return y_TO + pad(delta, (start, y_TO.shape[1] - start - outputs))

    def _down(self, pair: LoraPair) -> LoraPair:
        """x -> x aᵀ in the first columns of an intermediate."""
        rank = pair.a_RD.shape[0]
        return LoraPair(pair.a_RD, _identity(self._width, rank, pair.a_RD), 1.0)

    def _up(self, pair: LoraPair, shard: SiteShard) -> LoraPair:
        """The intermediate -> its terms. A gathered one has the ranks' parts `width` columns apart."""
        rank = pair.b_OR.shape[1]
        part = pair.a_RD.shape[0]
        picks = _identity(part, self._width, pair.b_OR)
        if not shard.partition.sums:
            picks = torch.block_diag(*[picks] * (rank // part))  # type: ignore[no-untyped-call]
        return LoraPair(picks, pair.b_OR, pair.scaling)


def _identity(rows: int, columns: int, like: Tensor) -> Tensor:
    return torch.eye(rows, columns, dtype=like.dtype, device=like.device)
