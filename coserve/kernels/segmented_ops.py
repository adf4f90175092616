"""The segmented kernels as torch.library ops, so that torch.compile and CUDA graphs see through them.

`tiles`, `items`, `spans`: `tables.Tiles`. `addresses`, `ranks`, `scalings`, `starts`: `tables.SiteTable`. `rows`: rows
of a tile. `R`: at least the largest rank that the table will hold, a multiple of 16; it sizes h and costs nothing else.
"""

# No postponed annotations here: torch reads the ops' schemas from them.
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from coserve.kernels import segmented_launch as launch
from coserve.kernels import segmented_launch_backward as backward


@torch.library.custom_op("coserve::lora_decode_", mutates_args=("ys",))
def lora_decode_(
    ys: Sequence[Tensor],
    x: Tensor,
    tiles: Tensor,
    items: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    rows: int,
    R: int,
) -> None:
    """y_g += scaling (x A_gᵀ) B_gᵀ in place for each y of the group; a few rows an adapter."""
    launch.decode(list(ys), x, tiles, items, addresses, ranks, scalings, rows, R)


@torch.library.custom_op("coserve::lora_long_", mutates_args=("ys", "counters"))
def lora_long_(
    ys: Sequence[Tensor],
    x: Tensor,
    tiles: Tensor,
    counters: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    rows: int,
    R: int,
) -> None:
    """y_g += scaling (x A_gᵀ) B_gᵀ in place for each y of the group; many rows an adapter."""
    launch.long_forward(list(ys), list(ys), x, tiles, counters, addresses, ranks, scalings, rows, R, keep=False)


def forward(ys: Sequence[Tensor], x: Tensor, tables: Sequence[Tensor], rows: int, R: int) -> list[Tensor]:
    """What `lora_train` gives. `tables`: tiles, counters, addresses, ranks and scalings."""
    outs = [torch.empty_like(y) for y in ys]
    tiles, counters, addresses, ranks, scalings = tables
    h = launch.long_forward(list(ys), outs, x, tiles, counters, addresses, ranks, scalings, rows, R, keep=True)
    return [*outs, h]


def gradients(
    dys: Sequence[Tensor],
    x: Tensor,
    h: Tensor,
    totals: Sequence[int],
    tables: Sequence[Tensor],
    rows: int,
    R: int,
    *,
    inputs_need: bool,
    weights_need: bool,
    sums: Tensor | None = None,
) -> list[Tensor]:
    """What `lora_train_backward` gives. `tables`: its seven, in order. With `sums` the weights' gradients are added there,
    and not given."""
    tiles, spans, counters, addresses, ranks, scalings, starts = tables
    g = backward.shrink_b(list(dys), tiles, counters, addresses, ranks, scalings, rows, R)
    out = [backward.expand_a(g, x.shape[1], tiles, addresses, ranks, rows)] if inputs_need else []
    if not weights_need:
        return out
    where = (tiles, spans)
    out += backward.outer(x, g, list(totals), *where, ranks, scalings, starts, rows, of_b=False, sums=sums)
    for site, dy in enumerate(dys):
        r, s, first = backward.from_site(site, ranks, scalings, starts)
        own = None if sums is None else backward.from_site(site, sums)[0]
        out += backward.outer(dy, h[site : site + 1], [totals[site]], *where, r, s, first, rows, of_b=True, sums=own)
    return out


@torch.library.custom_op("coserve::lora_train", mutates_args=())
def lora_train(
    ys: Sequence[Tensor],
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    totals: Sequence[int],
    tiles: Tensor,
    spans: Tensor,
    counters: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    starts: Tensor,
    rows: int,
    R: int,
) -> list[Tensor]:
    """y_g + scaling (x A_gᵀ) B_gᵀ for each y of the group, and h (G, T, R) last. Differentiable in ys, x, a and b.

    `a` and `b` are the tensors that the table points at, site by site and slot by slot; `totals` each site's ranks,
    summed; `tiles` cover every row.
    """
    return forward(ys, x, (tiles, counters, addresses, ranks, scalings), rows, R)


@lora_train.register_fake
def _(
    ys: Sequence[Tensor],
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    totals: Sequence[int],
    tiles: Tensor,
    spans: Tensor,
    counters: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    starts: Tensor,
    rows: int,
    R: int,
) -> list[Tensor]:
    return [*(torch.empty_like(y) for y in ys), x.new_empty((len(ys), x.shape[0], R))]


@torch.library.custom_op("coserve::lora_train_backward", mutates_args=())
def lora_train_backward(
    dys: Sequence[Tensor],
    x: Tensor,
    h: Tensor,
    totals: Sequence[int],
    tiles: Tensor,
    spans: Tensor,
    counters: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    starts: Tensor,
    rows: int,
    R: int,
    inputs_need: bool,
    weights_need: bool,
) -> list[Tensor]:
    """[dx] if `inputs_need`, then every site's dA and every site's dB, flat, if `weights_need`. Sums in fp32."""
    tables = (tiles, spans, counters, addresses, ranks, scalings, starts)
    return gradients(dys, x, h, totals, tables, rows, R, inputs_need=inputs_need, weights_need=weights_need)


@lora_train_backward.register_fake
def _(
    dys: Sequence[Tensor],
    x: Tensor,
    h: Tensor,
    totals: Sequence[int],
    tiles: Tensor,
    spans: Tensor,
    counters: Tensor,
    addresses: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    starts: Tensor,
    rows: int,
    R: int,
    inputs_need: bool,
    weights_need: bool,
) -> list[Tensor]:
    out = [torch.empty_like(x, memory_format=torch.contiguous_format)] if inputs_need else []
    if weights_need:
        out += [x.new_empty(total * x.shape[1]) for total in totals]
        out += [x.new_empty(total * dy.shape[1]) for total, dy in zip(totals, dys, strict=True)]
    return out


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:  # noqa: ANN401 - torch's own signature
    ys, x, a, b, ctx.totals, tiles, spans, counters, addresses, ranks, scalings, starts, ctx.rows, ctx.R = inputs
    ctx.sites, ctx.a_shapes, ctx.b_shapes = len(ys), [t.shape for t in a], [t.shape for t in b]
    ctx.save_for_backward(x, output[-1], tiles, spans, counters, addresses, ranks, scalings, starts)


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:  # noqa: ANN401 - torch's own signature
    x, h, *tables = ctx.saved_tensors
    dys = dense(grads[: ctx.sites])
    _, x_needs, a_needs, b_needs = ctx.needs_input_grad[:4]
    weights_need = any(a_needs) or any(b_needs)
    flat = lora_train_backward(dys, x, h, ctx.totals, *tables, ctx.rows, ctx.R, x_needs, weights_need)
    dx = flat.pop(0) if x_needs else None
    da: list[Tensor | None] = [None] * len(ctx.a_shapes)
    db: list[Tensor | None] = [None] * len(ctx.b_shapes)
    if weights_need:
        da[:] = cut_flat(flat[: ctx.sites], ctx.a_shapes)
        db[:] = cut_flat(flat[ctx.sites :], ctx.b_shapes)
    return (dys, dx, da, db, *[None] * 10)


def dense(dys: Sequence[Tensor]) -> list[Tensor]:
    """The same with neighbouring columns."""
    return [dy if dy.stride(1) == 1 else dy.contiguous() for dy in dys]


def cut_flat(flats: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The matrices of `shapes`, in order, that lie one after another in each of `flats`."""
    pieces: list[Tensor] = []
    for flat in flats:
        left, own = flat.numel(), list[torch.Size]()
        while left:
            own.append(shapes[len(pieces) + len(own)])
            left -= own[-1].numel()
        if len({width for _, width in own}) == 1:  # neighbouring rows: one view serves all
            pieces += torch.split(flat.view(-1, own[0][1]), [rows for rows, _ in own])
        else:
            parts = torch.split(flat, [shape.numel() for shape in own])
            pieces += [part.view(shape) for part, shape in zip(parts, own, strict=True)]
    return pieces


lora_train.register_autograd(_backward, setup_context=_setup)
