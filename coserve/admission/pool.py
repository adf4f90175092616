"""Whether an adapter can ever be served from the page pool, which holds adapters and the KV cache. Pure: no torch, no
files."""

from __future__ import annotations

import msgspec

from coserve.admission.shapes import ITEMSIZE, shapes_at
from coserve.core.errors import AdapterTooLarge
from coserve.core.gpu_memory import PoolShape
from coserve.core.types import BaseSpec, LoraSettings
from coserve.lora.files.targets import target_sites


def check_can_be_served(
    adapter: str,
    settings: LoraSettings,
    base: BaseSpec,
    pool: PoolShape,
    *,
    ranks: int,
    fully_sharded: bool,
    field: str | None,
) -> None:
    """Raise `AdapterTooLarge` for an adapter that would leave no page of the pool for tokens.

    `adapter`: its name, for the message; `settings`: valid ones, of a new adapter or an imported one; `ranks`,
    `fully_sharded`: as for `lora_shapes`.
    """
    size = served_bytes(settings, base, ranks=ranks, fully_sharded=fully_sharded)
    pages = -(-size // pool.page_bytes) + -(-settings.prefix_tokens // pool.page_tokens)  # each request's own
    if not pool.has_room_beside(pages):
        raise too_large(adapter, pages, pool, field=field)


def served_bytes(settings: LoraSettings, base: BaseSpec, *, ranks: int, fully_sharded: bool) -> int:
    """Return the least bytes that an adapter takes in one GPU's page pool: its matrices, without the padding to the
    kernels' load width.

    On a single GPU, block-diagonal matrices are stored with their zeros (`lora.store.packing`).
    """
    if ranks == 1 and base.device.startswith("cuda"):
        settings = msgspec.structs.replace(settings, bd_blocks=1, targets_bd_a=None, targets_bd_b=None)
    shapes = shapes_at(target_sites(settings, base), settings, base, ranks=ranks, fully_sharded=fully_sharded)
    return sum((shape.a + shape.b) * ITEMSIZE[base.dtype] + 4 * shape.magnitude for shape in shapes)


def too_large(adapter: str, pages: int, pool: PoolShape, *, field: str | None = None) -> AdapterTooLarge:
    """Return the error for the user, with the numbers. `pages`: those that the adapter needs."""
    least = (pages + 1) * pool.page_tokens
    return AdapterTooLarge(
        f"expected an adapter that leaves at least one page of the KV pool of {pool.pages} pages ({pool.tokens} "
        f"tokens, {pool.bytes} bytes), got {adapter!r} of {pages} pages ({pages * pool.page_bytes} bytes): it can "
        f"never be served; start the daemon with --kv-tokens {least} or more, or use an adapter of a smaller rank or "
        "with fewer targets",
        field=field,
    )
