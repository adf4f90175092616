"""Differentiable collectives, each with its rule for gradients.

Megatron-LM's pair (Shoeybi et al. '19, section 3): `copy_to_ranks` (f) stands before column-parallel modules, and
`sum_over_ranks` (g) after row-parallel ones. Without gradients they are just the mesh's collectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from coserve.model.parallel.mesh import Mesh


def copy_to_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """Return `x`, which is equal on every rank. Backward: sum the ranks' gradients, each of which is partial."""
    if mesh.size == 1 or not _learns(x):
        return x
    out: Tensor = _Copy.apply(x, mesh)  # type: ignore[no-untyped-call]
    return out


def sum_over_ranks(x: Tensor, mesh: Mesh, addend: Tensor | None = None) -> Tensor:
    """Return the sum of the ranks' `x` plus `addend`, which is equal on every rank. Backward: the gradient as it is.

    May overwrite `x` if no gradient is required.
    """
    if mesh.size == 1 or not _learns(x):
        return mesh.all_reduce(x) if addend is None else mesh.all_reduce(x, addend)
    out: Tensor = _Sum.apply(x, mesh)  # type: ignore[no-untyped-call]
    return out if addend is None else out + addend


def gather_columns(x: Tensor, mesh: Mesh, *, shared: bool = False) -> Tensor:
    """Concatenate the ranks' `x` (..., C). Backward: take this rank's columns of the gradient. `shared`: what follows
    differs between ranks, so their gradients are summed first."""
    if mesh.size == 1 or not _learns(x):
        return mesh.all_gather(x)
    out: Tensor = _Gather.apply(x, mesh, shared)  # type: ignore[no-untyped-call]
    return out


def sum_shared(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum of the ranks' `x` for computations that differ between ranks. Backward: sum the ranks' gradients,
    too."""
    return copy_to_ranks(sum_over_ranks(x, mesh), mesh)


def divide_gradient(x: Tensor, mesh: Mesh) -> Tensor:
    """Return `x`. Backward: divide the gradient by the number of ranks."""
    if mesh.size == 1 or not _learns(x):
        return x
    out: Tensor = _Divide.apply(x, mesh.size)  # type: ignore[no-untyped-call]
    return out


def _learns(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:  # noqa: ANN401 - torch's own signature
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - torch's own signature
        return ctx.mesh.all_reduce_out_of_place(gradient), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:  # noqa: ANN401 - torch's own signature
        return mesh.all_reduce_out_of_place(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - torch's own signature
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, sums: bool) -> Tensor:  # noqa: ANN401 - torch's own signature
        ctx.mesh, ctx.sums = mesh, sums
        return mesh.all_gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 - torch's own signature
        mesh = ctx.mesh
        if ctx.sums:
            gradient = mesh.all_reduce_out_of_place(gradient)
        return gradient.chunk(mesh.size, -1)[mesh.rank], None, None


class _Divide(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:  # noqa: ANN401 - torch's own signature
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - torch's own signature
        return gradient / ctx.size, None
