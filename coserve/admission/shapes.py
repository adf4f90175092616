"""Sizes of an adapter's matrices, and of the state that a job keeps on one GPU between micro-batches. Pure: no torch,
no files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from coserve.admission.optimizers import (
    ALIGNED,
    BUFFERS,
    CODES,
    COPIES,
    PIECE,
    StateKind,
    aligned,
    paged_kinds,
    state_kinds,
)
from coserve.admission.ranks import site_fits
from coserve.core.names import DECODER, is_prefix
from coserve.core.training.settings import Optimizer
from coserve.core.types import BaseSpec, LoraSettings, SiteSpec
from coserve.lora.files.bdlora import ParallelStyle, blocks_at, packed_shapes, parallel_style
from coserve.lora.files.ends import replaced_rows
from coserve.lora.files.targets import rank_and_scaling, resolve_targets

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by dtype."""
ALLOCATION = 512
"""Bytes. CUDA's caching allocator rounds sizes up to a multiple of it."""
SHORT_ROW = 64
"""Tokens of a short row of a cartridge's corpus: a question and its answer."""
BLOCK = 1 << 23
"""Elements of a block of `finetune.host_copy.FlatLayout`, unless a tensor is larger: 32 MiB in fp32."""


@dataclass(frozen=True)
class SiteShape:
    """An adapter's pair of matrices at one site, on one GPU."""

    name: str
    layer: int
    role: str
    """The site's name within its layer."""
    rank: int
    inputs: int
    """Features of the site's input."""
    a: int
    """Elements of a_RD, as stored on this GPU."""
    b: int
    """Elements of b_OR, as stored on this GPU."""
    magnitude: int = 0
    """Elements of DoRA's magnitude; 0: plain LoRA."""
    kept: int = 0
    """Elements per token that training keeps for other adapters than LoRA of linear modules. Experts: for each chosen
    expert its input, x Aᵀ unscaled and scaled, and its LoRA term. A KV prefix: the keys and values that a row of
    `SHORT_ROW` tokens attends to."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Elements of each tensor of the pair: a_RD, b_OR, and DoRA's magnitude if there is one."""
        return (self.a, self.b, self.magnitude) if self.magnitude else (self.a, self.b)


def role_of(site: str) -> str:
    """Return a site's name within its layer: `self_attn.q_proj` for `model.layers.0.self_attn.q_proj`."""
    parts = site.removesuffix(DECODER).split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[layer + 1 :])


def lora_shapes(
    settings: LoraSettings, base: BaseSpec, *, ranks: int = 1, fully_sharded: bool = False
) -> tuple[SiteShape, ...]:
    """Return an adapter's shapes on one of the `ranks` GPUs that share the base, in the optimizer's order.

    Raises `InvalidRequest` as `resolve_targets` does.
    """
    return shapes_at(resolve_targets(settings, base), settings, base, ranks=ranks, fully_sharded=fully_sharded)


def shapes_at(
    sites: Iterable[str], settings: LoraSettings, base: BaseSpec, *, ranks: int = 1, fully_sharded: bool = False
) -> tuple[SiteShape, ...]:
    """Return shapes as `lora_shapes` does, for checked settings; those of an imported adapter may exceed the ranges of
    new ones."""
    found = []
    for name in sites:
        site, (rank, _) = base.site(name), rank_and_scaling(settings, name)
        blocks = blocks_at(settings, name)
        a, b = (rows * columns for rows, columns in packed_shapes(site, rank, blocks))
        if ranks > 1:
            a, b = _part(name, site, rank, blocks, ranks, fully_sharded=fully_sharded)
        magnitude = _rows(name, site, ranks) if settings.use_dora else 0
        kept = site.chosen * (site.in_features + 2 * rank + site.out_features) if site.experts > 1 else 0
        kept = 2 * site.in_features * (2 + -(-rank // SHORT_ROW)) if is_prefix(name) else kept
        found.append(SiteShape(name, site.layer, role_of(name), rank, site.in_features, a, b, magnitude, kept))
    for name, (rows, width) in replaced_rows(settings, base).items():
        found.append(SiteShape(name, base.site(name).layer, role_of(name), 0, width, rows * width, 0))
    return tuple(sorted(found, key=lambda shape: (shape.layer, shape.name)))


def _rows(name: str, site: SiteSpec, ranks: int) -> int:
    """Return the rows of a site's weight that one GPU holds a part of, or all of; never too few."""
    shards = ranks // site.holders if parallel_style(name) is ParallelStyle.COLUMN else 1
    return -(-site.out_features // shards)


def _part(
    name: str, site: SiteSpec, rank: int, blocks: tuple[int, int], ranks: int, *, fully_sharded: bool
) -> tuple[int, int]:
    """Return the elements of A and B that one GPU holds (`parallel.lora.partition_pair`); never too few."""
    if not site_fits(name, blocks, ranks):
        blocks = 1, 1  # the pair is made dense
    a, b = (rows * columns for rows, columns in packed_shapes(site, rank, blocks))
    part_a, part_b = -(-a // ranks), -(-b // ranks)
    if site.by_expert:
        return part_a, part_b
    if site.experts > 1:
        return (part_a, b) if name.endswith("down_proj") else (a, part_b)
    most = max(blocks)
    split_rank = fully_sharded and most == 1 and rank % ranks == 0 and site.out_features % ranks == 0
    match parallel_style(name):
        case ParallelStyle.COLUMN:
            shards = ranks // site.holders
            if most > 1 and most % shards == 0:
                part_a = -(-a // shards)
            elif not split_rank:
                part_a = a
            return part_a, -(-b // shards)
        case ParallelStyle.ROW:
            return part_a, (part_b if split_rank or (most > 1 and most % ranks == 0) else b)
        case None:
            return (part_a if split_rank else a), b  # the module may be whole on every GPU


@dataclass(frozen=True)
class JobStateBytes:
    """Bytes that a job keeps between micro-batches."""

    adapter: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.adapter + self.gradients + self.optimizer


def job_state_bytes(
    shapes: Collection[SiteShape],
    dtype: str,
    optimizer: Optimizer = Optimizer.ADAMW,
    *,
    early_stopping: bool,
    compared: Iterable[SiteShape] = (),
) -> JobStateBytes:
    """Return the sizes of what `finetune.optimizer` keeps: the adapter in the base's dtype; fp32 gradient sums; fp32
    weights; the optimizer's moments, or the buffers through which paged moments pass; with early stopping, the best
    weights. `compared`: shapes of the frozen adapter in the loss, a teacher or a DPO reference."""
    size, element = flat_elements(_parts(shapes), aligned(optimizer)), ITEMSIZE[dtype]
    paged = paged_kinds(optimizer)
    kept = (kind for kind in state_kinds(optimizer, early_stopping=early_stopping) if kind not in paged)
    buffers = BUFFERS * sum(_rounded(row_bytes(kind, min(PIECE, size))) for kind in paged)
    constants = 2 * 4 * CODES if optimizer.eight_bit else ALLOCATION  # without tables: AdamW's step counts
    frozen = sum(_rounded(part * element) for shape in compared for part in shape.parts)
    # DoRA's scales, norms, and squares of the base's rows
    frozen += sum(3 * _rounded(4 * shape.magnitude) for shape in shapes)
    return JobStateBytes(
        adapter=_rounded(size * element) + frozen,
        gradients=_rounded(4 * size),
        optimizer=sum(_rounded(row_bytes(kind, size)) for kind in kept) + buffers + constants,
    )


def pinned_bytes(shapes: Iterable[SiteShape], optimizer: Optimizer, *, early_stopping: bool) -> int:
    """Return the pinned host memory of a job's state: a copy of each row for checkpoints, two copies of paged
    moments."""
    parts, paged = _parts(shapes), paged_kinds(optimizer)
    size, block = (find(parts, aligned(optimizer)) for find in (flat_elements, flat_block))
    return sum(
        (COPIES if kind in paged else 1) * _pinned(row_bytes(kind, size), row_bytes(kind, block))
        for kind in state_kinds(optimizer, early_stopping=early_stopping)
    )


def gathered_bytes(
    shapes: Iterable[SiteShape], whole: Iterable[SiteShape], ranks: int, optimizer: Optimizer, *, early_stopping: bool
) -> int:
    """Return the pinned host memory of a job's state that rank 0 gathers from `ranks` GPUs for a checkpoint. `shapes`:
    on one of them; `whole`: of the whole adapter."""
    sizes = {
        own.name: sum(
            part if part == all_of else ranks * part for part, all_of in zip(own.parts, each.parts, strict=True)
        )
        for own, each in zip(shapes, whole, strict=True)
    }
    chunks = [sum(sizes[site] for site in chunk) for chunk in gather_chunks(sizes)]
    kinds = state_kinds(optimizer, early_stopping=early_stopping)
    return sum(_power_of_two(row_bytes(kind, chunk)) for kind in kinds for chunk in chunks)


def _parts(shapes: Iterable[SiteShape]) -> list[int]:
    """Elements of each tensor, in order."""
    return [part for shape in shapes for part in shape.parts]


def row_bytes(kind: StateKind, size: int) -> int:
    """Return the bytes of a row of the optimizer's state, or of its part for `size` weights."""
    return kind.itemsize * size // kind.per


def flat_block(sizes: Iterable[int], aligned: int = ALIGNED) -> int:
    """Return the elements of a block of a flat buffer: no tensor crosses the border of a block."""
    return max([BLOCK, *(-(-size // aligned) * aligned for size in sizes)])


def flat_elements(sizes: Iterable[int], aligned: int = ALIGNED) -> int:
    """Return the elements of a flat buffer of tensors of these sizes, in order, padding included."""
    padded = [-(-size // aligned) * aligned for size in sizes]
    block, total = flat_block(padded, aligned), 0
    for size in padded:
        if total % block + size > block:
            total += -total % block
        total += size
    return total


def gather_chunks(sizes: Mapping[str, int]) -> list[list[str]]:
    """Divide sites into chunks that ranks gather at once: of at most `BLOCK` gathered elements each, or of one site.
    `sizes`: elements of each site."""
    chunks, size = list[list[str]](), 0
    for site, own in sizes.items():
        if not chunks or size + own > BLOCK:
            chunks.append([])
            size = 0
        chunks[-1].append(site)
        size += own
    return chunks


def _pinned(size: int, block: int) -> int:
    """Return the bytes that `size` bytes take in pinned blocks of `block` bytes: torch rounds each block up to a power
    of two."""
    blocks, rest = divmod(size, block)
    return blocks * _power_of_two(block) + (_power_of_two(rest) if rest else 0)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _rounded(size: int) -> int:
    return -(-size // ALLOCATION) * ALLOCATION
