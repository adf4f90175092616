"""Learns a base's `TrainingCosts` from the memory of micro-batches, measured phase by phase.

Adapters at all sites, and at one site group at a time, show what each group makes a layer keep (M_act in the ETS paper,
section 4.2.2), and what the backward still needs once the last group is freed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from coserve.admission.shapes import ITEMSIZE, role_of
from coserve.core.gpu_memory import GroupCosts, HeadCosts, Kept, LayerTime, LevelCosts, LinearBytes, TrainingCosts
from coserve.core.types import BaseSpec
from coserve.kernels.lora.types import SiteGroup
from coserve.model.base import Base
from coserve.model.groups import shared_inputs

MOST_GROUPS = 8
"""Site groups per layer up to which each is measured separately. A mixture of experts has hundreds: the sizes of their
inputs are computed instead."""
FEW_POSITIONS = 1
"""Target positions so few that their logits need less memory than the backward of the final norm, even on small
bases."""


@dataclass(frozen=True)
class Phases:
    """Bytes of one micro-batch, beyond what the job keeps permanently."""

    positions: int
    """Number of loss targets."""
    begin: int
    """Held after the first layer's forward."""
    kept: int
    """Held after the last layer's forward."""
    forward: int
    """Peak up to the end of the last layer's forward."""
    head: int
    """Peak up to the end of the head."""
    backward: int
    """Peak from the end of the head to the end of the backward."""
    whole: int
    """Overall peak, including the optimizer step."""
    job: int
    """Bytes that the job keeps between micro-batches."""


class MeasuresPhases(Protocol):
    """The signature of `MemoryProfiler.phases`."""

    def __call__(
        self,
        tokens: int,
        *,
        recomputed: int = 0,
        partly: int = 0,
        targets: tuple[str, ...] | None = None,
        positions: int | None = None,
    ) -> Phases: ...


def site_groups(base: Base) -> tuple[tuple[str, ...], ...]:
    """Groups of sites that read the same input, by their names within a layer (`role_of`), in execution order. Layers
    may differ; each name is in one group."""
    shared = [one.group for one in base.sites.shared()] or [one for layer in shared_inputs(base) for one in layer]
    return roles_of_groups(shared)


def roles_of_groups(groups: Sequence[SiteGroup]) -> tuple[tuple[str, ...], ...]:
    """Convert the groups to their sites' names within a layer, each name once: see `GroupCosts.roles`."""
    found: dict[str, None] = {}
    split: list[tuple[str, ...]] = []
    for group in groups:
        roles = tuple(role for role in map(role_of, group.names) if role not in found)
        found.update(dict.fromkeys(roles))
        split += [roles] if roles else []
    return tuple(split)


def measure_costs(
    phases: MeasuresPhases, groups: Sequence[tuple[str, ...]], spec: BaseSpec, rank: int, tokens: int, most: int
) -> TrainingCosts:
    """Measure micro-batches of `tokens` and of half as many tokens. `rank`: LoRA rank of the adapters that `phases`
    measures; `groups`: as from `site_groups`; `most`: positions whose logits are computed at once."""
    half, element, above = max(1, tokens // 2), ITEMSIZE[spec.dtype], max(1, spec.layers - 1)
    small, large = phases(half), phases(tokens)
    again = tuple(phases(size, recomputed=spec.layers) for size in (half, tokens))
    fewer = phases(tokens, positions=max(1, min(large.positions, most) // 2))
    few = phases(half, positions=FEW_POSITIONS), phases(tokens, positions=FEW_POSITIONS)
    alone = [phases(tokens, targets=_names(spec, roles)) for roles in groups] if len(groups) <= MOST_GROUPS else []
    sites = [sum(1 for name in spec.sites if role_of(name) in roles) / spec.layers for roles in groups]
    ranks = [element * rank * count for count in sites]  # size of x Aᵀ, in bytes per token and layer
    each = (large.kept - large.begin) / tokens / above - sum(ranks)
    """A layer's activations plus the inputs of all groups, in bytes per token."""
    fixed = _line(half, small.kept, tokens, large.kept).fixed
    if alone and spec.layers > 1:
        own = [(one.kept - one.begin) / tokens / above - part for one, part in zip(alone, ranks, strict=True)]
        layer = (sum(own) - each) / (len(own) - 1) if len(own) > 1 else 0.0
        inputs = [max(0.0, value - layer) for value in own]
        bottoms = [
            (one.begin - fixed) / tokens - part - kept for one, part, kept in zip(alone, ranks, inputs, strict=True)
        ]
    else:
        inputs = [
            element * max(spec.sites[name].in_features for name in _names(spec, roles)) * min(1.0, count)
            for roles, count in zip(groups, sites, strict=True)
        ]
        layer = max(0.0, each - sum(inputs))
        bottoms = [max(0.0, (large.begin - fixed) / tokens - sum(ranks) - sum(inputs))] * len(groups)
    own_input = spec.carried * element
    last = _line(half, small.backward - small.kept, tokens, large.backward - large.kept)
    freed = ranks[-1] + inputs[-1]
    rest = [one.backward - one.kept for one in alone[:-1]]
    others = max([*rest, last.at(tokens)]) if rest else last.at(tokens) + tokens * freed
    return TrainingCosts(
        rank=rank,
        fixed=fixed,
        layer=layer,
        groups=tuple(
            GroupCosts(roles=roles, kept=kept, bottom=bottom)
            for roles, kept, bottom in zip(groups, inputs, bottoms, strict=True)
        ),
        recompute=_line(
            half,
            again[0].kept - half * (spec.layers - 1) * own_input,
            tokens,
            again[1].kept - tokens * (spec.layers - 1) * own_input,
        ),
        head=_head((half, small), (tokens, large), fewer, few, most),
        last=last,
        others=LinearBytes(fixed=last.fixed, per_token=(others - last.fixed) / tokens),
    )


def measure_levels(
    phases: MeasuresPhases,
    costs: TrainingCosts,
    spec: BaseSpec,
    stays: Mapping[Kept, Collection[str]],
    times: Mapping[Kept, LayerTime],
    tokens: int,
) -> TrainingCosts:
    """Return `costs`, which were measured with `Kept.ALL`, with the costs of the other recompute levels added.
    `stays`: sites whose x Aᵀ is kept, by level; `times`: layer times by level. For the rest see `measure_costs`."""
    half, element = max(1, tokens // 2), ITEMSIZE[spec.dtype]
    own_input, levels = spec.carried * element, {}
    for kept, names in stays.items():
        recomputed, partly = (spec.layers, 0) if kept is Kept.INPUT else (0, spec.layers)
        small, large = (phases(size, recomputed=recomputed, partly=partly) for size in (half, tokens))
        inputs = costs.recompute.at(tokens) + tokens * (spec.layers - 1) * own_input
        lora = element * costs.rank * len(names) / spec.layers
        levels[kept] = LevelCosts(
            kept=max(0.0, (large.kept - inputs) / tokens / spec.layers + own_input - lora),
            shrinks=tuple(any(role_of(name) in group.roles for name in names) for group in costs.groups),
            backward=_line(half, small.backward - small.kept, tokens, large.backward - large.kept),
            time=times[kept],
        )
    return msgspec.structs.replace(costs, time=times[Kept.ALL], levels=levels)


def _names(spec: BaseSpec, roles: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in spec.sites if role_of(name) in roles)


def _line(small: int, low: float, large: int, high: float) -> LinearBytes:
    """Fit a line through two measurements, or through the origin and one if both are at the same size."""
    slope = (high - low) / (large - small) if large > small else high / max(1, large)
    return LinearBytes(fixed=high - slope * large, per_token=slope)


def _head(
    small: tuple[int, Phases], large: tuple[int, Phases], fewer: Phases, few: tuple[Phases, Phases], most: int
) -> HeadCosts:
    """Fit the head's costs. `fewer`: like `large`, with fewer positions; `few`: like `small` and `large`, with
    `FEW_POSITIONS`."""
    (half, _), (tokens, whole) = small, large
    own = [found.head - found.kept for found in (small[1], whole, fewer, *few)]
    at_once = [min(found.positions, most) for found in (small[1], whole, fewer)]
    less = at_once[1] - at_once[2]
    per_position = max(0.0, (own[1] - own[2]) / less) if less > 0 else 0.0
    logits = _line(half, own[0] - per_position * at_once[0], tokens, own[1] - per_position * at_once[1])
    return HeadCosts(
        norm=_line(half, own[3], tokens, own[4]),
        fixed=logits.fixed,
        per_token=logits.per_token,
        per_position=per_position,
        most=most,
    )
