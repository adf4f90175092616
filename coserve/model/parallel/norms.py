"""RMS norms over features that are partitioned among the ranks: the mean of squares is one over all ranks' features.

The family's own module normalises this rank's features; its output is then scaled from this rank's mean to that of all
ranks, which costs a sum of 4 bytes a token. So a norm may add to its weight, gate its input or its output as it likes.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from coserve.model.parallel.functions import sum_shared
from coserve.model.parallel.mesh import Mesh

MEAN = "coserve_mean"
"""Attribute of a norm over partitioned features: the mesh."""


def share_mean(module: nn.Module, mesh: Mesh) -> None:
    """Let a norm of this rank's features (..., D/N) normalise by the mean over all ranks'."""
    setattr(module, MEAN, mesh)
    module.register_forward_hook(_scaled, with_kwargs=True)


def _scaled(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor | None], y: Tensor) -> Tensor:
    mesh, x = cast(Mesh, getattr(module, MEAN)), args[0].float()
    gate = args[1] if len(args) > 1 else kwargs.get("gate")
    if gate is not None and not getattr(module, "norm_before_gate", False):
        x = x * silu(gate.float())
    own = x.pow(2).mean(-1, keepdim=True)
    total = torch.ops.coserve.rank_sum(own) if torch.compiler.is_dynamo_compiling() else sum_shared(own.clone(), mesh)
    epsilon = cast(float, getattr(module, "variance_epsilon", None) or getattr(module, "eps", 0.0))
    scale = ((own + epsilon) / (total / mesh.size + epsilon)).sqrt()
    return (y.float() * scale).to(y.dtype)
