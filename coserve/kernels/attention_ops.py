"""The fused attention kernels as torch.library ops, so that torch.compile sees through them.

`table`, `items`, `tiles`, `counters`, `parts`, `stats`: `attention_launch`. All arguments that an op names as changed are
written in place.
"""

# No postponed annotations here: torch reads the ops' schemas from them.
import torch
from torch import Tensor

from coserve.kernels import attention_launch as launch


@torch.library.custom_op("coserve::paged_decode_", mutates_args=("out", "keys", "values", "counters", "parts", "stats"))
def paged_decode_(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    items: Tensor,
    parts: Tensor,
    stats: Tensor,
    counters: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Attention of the items' rows, into `out` (T, H, D); their keys and values go to their pages."""
    held = launch.Scratch(parts, stats, counters)
    scores = launch.Scores(scaling, None, softcap, sinks)
    launch.decode(out, q, k, v, launch.Layer(keys, values, table), items, held, scores)


@torch.library.custom_op("coserve::paged_prefill_", mutates_args=("out", "keys", "values"))
def paged_prefill_(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tiles: Tensor,
    rows: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Attention of the tiles' rows, into `out` (T, H, D); their keys and values go to their pages.

    `rows`: new tokens of all tiles, times query heads, as the tiles were cut for.
    """
    scores = launch.Scores(scaling, window, softcap, sinks)
    blocks = launch.prefill_blocks(q.shape[2], q.dtype, rows)
    launch.prefill(out, q, k, v, launch.Layer(keys, values, table), tiles, scores, blocks)
