"""The fused attention kernels as a step calls them, once a layer.

Plain functions: `coserve::attend` around them (`model.fused`) is opaque to torch.compile already, and an op of
torch.library checks on every call what these cannot do wrong, which takes longer than the launch.
`table`, `items`, `tiles`, `counters`, `parts`, `stats`: `attention_launch`; the last three are written in place.
"""

from __future__ import annotations

from torch import Tensor

from coserve.kernels import attention_launch as launch
from coserve.kernels.attention_plan import programs_each


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
    sequences: int,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Attention of the items' rows, into `out` (T, H, D); their keys and values go to their pages.

    `sequences`: as many as the items were cut for.
    """
    held = launch.Scratch(parts, stats, counters)
    scores = launch.Scores(scaling, None, softcap, sinks)
    group, each = q.shape[0] // k.shape[0], programs_each(sequences, k.shape[0])
    blocks = launch.decode_blocks(q.shape[2], q.dtype, group, each, q.device)
    launch.decode(out, q, k, v, launch.Layer(keys, values, table), items, held, scores, blocks)


def paged_prefill_(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    tiles: Tensor,
    held: launch.Scratch | None,
    rows: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Attention of the tiles' rows, into `out` (T, H, D); their keys and values go to their pages.

    `rows`: new tokens of all tiles, times query heads, as the tiles were cut for. `held`: None where each tile is one item.
    """
    scores = launch.Scores(scaling, window, softcap, sinks)
    blocks = launch.prefill_blocks(q.shape[2], q.dtype, rows, q.device)
    launch.prefill(out, q, k, v, launch.Layer(keys, values, table), tiles, held, scores, blocks)
