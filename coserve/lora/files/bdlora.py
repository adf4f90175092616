"""BD-LoRA: which matrices of an adapter are block-diagonal under its settings. No torch, no files.

Tensor parallelism shards the weight of a column-parallel site (q, k, v, gate, up) by output features and that of a
row-parallel one (o, down) by input features. An adapter of N blocks adds an independent LoRA of rank r/N to each of N
such shards: B is block-diagonal at column-parallel sites and A at row-parallel ones (the BD-LoRA paper, section 3).
Only the blocks are stored, packed as PEFT does: b_OR as (O, R/N), a_RD as (R, D/N). Block i is the i-th of N equal
groups of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from functools import cache

from coserve.core.errors import InvalidRequest
from coserve.core.limits import MAX_BLOCKS
from coserve.core.types import BaseSpec, LoraSettings, SiteSpec

CONV1D_FAMILIES = frozenset({"gpt2"})
"""Families whose linear modules are transformers' `Conv1D`, which store their weight transposed."""


class ParallelStyle(Enum):
    """How tensor parallelism shards a site's weight (`ParallelStyle` of torch)."""

    COLUMN = "column-parallel"
    """Sharded by output features."""
    ROW = "row-parallel"
    """Sharded by input features."""


_LEAVES = {
    ParallelStyle.COLUMN: ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "c_fc", "dense_h_to_4h"),
    ParallelStyle.ROW: ("o_proj", "out_proj", "dense", "Wo", "down_proj", "fc2", "c_proj", "dense_4h_to_h"),
}
"""Last components of sites' names, by style. Fused projections (`qkv_proj`, `gate_up_proj`, `c_attn`) are not listed: a
contiguous piece of their rows is no shard of the model."""
_STYLE_OF = {leaf: style for style, leaves in _LEAVES.items() for leaf in leaves}
_RECURRENT = (".linear_attn.out_proj", ".mamba.out_proj", ".mixer.out_proj", ".conv.out_proj")
"""Suffixes of the names of recurrent mixers' modules. Adapters have no blocks there."""


def parallel_style(site: str) -> ParallelStyle | None:
    """Return how a site is sharded; None for a module that is not in the table."""
    return None if site.endswith(_RECURRENT) else _STYLE_OF.get(_leaf(site))


def blocks_at(settings: LoraSettings, site: str) -> tuple[int, int]:
    """Return the numbers of diagonal blocks of a site's A and B; 1 means dense."""
    in_a, in_b = _blocked(settings, site)
    return (settings.bd_blocks if in_a else 1), (settings.bd_blocks if in_b else 1)


def packed_shapes(site: SiteSpec, rank: int, blocks: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of a_RD and b_OR as they are stored; those of experts stacked, one after another."""
    in_a, in_b = blocks
    return (site.experts * rank, site.in_features // in_a), (site.experts * site.out_features, rank // in_b)


def undivided(site: SiteSpec, rank: int, blocks: tuple[int, int]) -> str | None:
    """Name the size of a site that its blocks do not divide, such as `rank 6`; None if they divide all."""
    in_a, in_b = blocks
    sizes = (
        ("rank", rank, max(blocks)),
        ("in_features", site.in_features, in_a),
        ("out_features", site.out_features, in_b),
    )
    return next((f"{name} {size}" for name, size, count in sizes if size % count), None)


def check_blocks(settings: LoraSettings, base: BaseSpec, ranks: Mapping[str, int]) -> None:
    """Raise `InvalidRequest` unless a new adapter with these ranks (by site) can have the blocks that its settings
    request."""
    count = settings.bd_blocks
    if not 1 <= count <= MAX_BLOCKS:
        raise InvalidRequest(f"bd_blocks: expected 1 to {MAX_BLOCKS} blocks, got {count}", field="bd_blocks")
    if count == 1:
        for field in ("targets_bd_a", "targets_bd_b"):
            if getattr(settings, field) is not None:
                raise InvalidRequest(f"{field} needs bd_blocks of 2 or more", field=field)
        return
    if settings.use_dora:
        raise InvalidRequest("expected bd_blocks of 1 with use_dora", field="use_dora")
    if base.family in CONV1D_FAMILIES:
        raise InvalidRequest(
            f"BD-LoRA is not implemented for {base.family}: its linear modules are Conv1D, which PEFT's BD-LoRA "
            "refuses too",
            field="bd_blocks",
        )
    _check_patterns(settings, ranks)
    for site, rank in ranks.items():
        blocks = blocks_at(settings, site)
        if blocks == (1, 1) and not _explicit(settings):
            raise InvalidRequest(
                f"{site} is neither column- nor row-parallel, so BD-LoRA cannot shard it: expected targets among "
                f"{', '.join(_known(base.sites))}",
                field="targets",
            )
        wrong = undivided(base.sites[site], rank, blocks)
        if wrong is not None:
            raise InvalidRequest(f"{site}: {wrong} does not divide into {count} blocks", field="bd_blocks")
        if settings.init == "orthogonal" and rank // max(blocks) % 2:
            raise InvalidRequest(
                "orthogonal initialisation needs an even rank in each block: expected a multiple of "
                f"{2 * max(blocks)}, got {rank}",
                field="init",
            )


def peft_blocks(settings: LoraSettings, sites: Collection[str]) -> dict[str, object] | None:
    """PEFT's `use_bdlora` for an adapter with these sites; None for plain LoRA.

    PEFT looks for its patterns anywhere in a module's path, so each pattern is as short as it can be without matching
    others.
    """
    if settings.bd_blocks == 1:
        return None
    blocked = {site: _blocked(settings, site) for site in sites}
    a, b = settings.targets_bd_a or (), settings.targets_bd_b or ()
    if not _explicit(settings):
        a, b = (_patterns([site for site in sites if blocked[site][which]], sites) for which in (0, 1))
    assert all(blocked[site] == (_named(a, site), _named(b, site)) for site in sites), (
        "expected patterns of these sites alone"
    )
    return {
        "target_modules_bd_a": list(a),
        "target_modules_bd_b": list(b),
        "nblocks": settings.bd_blocks,
        "match_strict": all(any(both) for both in blocked.values()),
    }


def _explicit(settings: LoraSettings) -> bool:
    """Whether the settings name the block-diagonal sites themselves, which overrides the table of styles."""
    return settings.targets_bd_a is not None or settings.targets_bd_b is not None


def _blocked(settings: LoraSettings, site: str) -> tuple[bool, bool]:
    """Whether a site's A, and its B, is block-diagonal."""
    if settings.bd_blocks == 1:
        return False, False
    if _explicit(settings):
        return _named(settings.targets_bd_a or (), site), _named(settings.targets_bd_b or (), site)
    style = parallel_style(site)
    return style is ParallelStyle.ROW, style is ParallelStyle.COLUMN


def _named(patterns: Iterable[str], site: str) -> bool:
    """Whether one of the patterns occurs in the site's name, PEFT's rule."""
    return any(pattern in site for pattern in patterns)


def _check_patterns(settings: LoraSettings, sites: Collection[str]) -> None:
    for field in ("targets_bd_a", "targets_bd_b"):
        patterns = getattr(settings, field) or ()
        for pattern in patterns:
            if not pattern or not any(pattern in site for site in sites):
                raise InvalidRequest(f"{pattern[:80]!r} is part of none of the targeted sites' names", field=field)
    for site in sites:
        if _blocked(settings, site) == (True, True):
            raise InvalidRequest(f"{site}: expected it in one of targets_bd_a and targets_bd_b", field="targets_bd_a")


def _patterns(chosen: Collection[str], sites: Collection[str]) -> tuple[str, ...]:
    named = set(chosen)
    others = [site for site in sites if site not in named]

    @cache
    def theirs_alone(part: str) -> bool:
        return not any(part in other for other in others)

    found: dict[str, None] = {}
    for site in chosen:
        candidates = (".".join(site.split(".")[-parts:]) for parts in (1, 2))
        found[next(filter(theirs_alone, candidates), site)] = None
    return tuple(found)


def _known(sites: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_leaf(site) for site in sites if parallel_style(site) is not None))


def _leaf(site: str) -> str:
    return site.rsplit(".", 1)[-1]
