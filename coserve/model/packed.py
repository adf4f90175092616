"""Packs the base's weights in oneDNN's own layout, for products of few rows on a CPU.

torch's GEMM copies a whole weight into such a layout at every call, and below 8 rows its bits depend on the number of
rows. A product of a packed weight copies nothing, and from 2 rows on a row's bits do not depend on the number of rows.
On many processors, and for many shapes, this holds from 1 row on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coserve.kernels.attention.interface import AttentionParams
from coserve.model.fingerprint import is_fake
from coserve.model.forward_context import current

log = logging.getLogger(__name__)

PACKED_ROWS = (1, 2, 4, 8), (2, 4, 8)
"""Candidates for `Base.packed_rows`: numbers of rows to which small batches are padded, instead of `base.CPU_ROWS`.
`choose_rows` takes the first with which a row's bits do not depend on the batch. A packed product of one row may round
differently, and so may the last elements of elementwise kernels, which take 32 at a time. oneDNN compiles a kernel for
each number."""
PACKED_FOR = 16
"""Rows of a batch that oneDNN optimises the packed layout for."""
CHECKED_ROWS = 13
"""Most rows of the batches that `choose_rows` compares."""
MEMORY_SHARE = 0.25
"""Most memory of the packed copy, as a fraction of the machine's."""
PACKED = "coserve_packed"
"""Attribute of a module that holds its packed weight."""


class OwnValues:
    """An `Attention` in which each token sees only itself, for checks of everything else."""

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        return v_KTD.repeat_interleave(q_HTD.shape[0] // v_KTD.shape[0], 0).transpose(0, 1)


@dataclass(slots=True)
class _Packed:
    """A module's weight in oneDNN's layout, and its bias. Such a weight cannot be copied: a copy of the module has None
    until it is packed itself."""

    weight: Tensor | None
    bias: Tensor | None

    def __deepcopy__(self, memo: dict[int, object]) -> _Packed:
        return _Packed(None, None)


def pack_weights(model: PreTrainedModel) -> bool:
    """Pack the weights of all linear modules, and keep the weights themselves, which training uses. Return False,
    having done nothing, if it would not pay or is not possible.

    It needs float32 weights, all matrices but embeddings in linear modules, and memory for the copy.
    """
    linears = [module for module in model.modules() if type(module) in (nn.Linear, Conv1D)]
    known = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Linear, Conv1D, nn.Embedding))}
    parameters = list(model.parameters())
    if not torch._C._has_mkldnn or any(one.dtype != torch.float32 or is_fake(one) for one in parameters):
        return False
    if any(one.dim() > 1 and id(one) not in known for one in parameters):
        return False
    new = [module for module in linears if (found := vars(module).get(PACKED)) is None or found.weight is None]
    if any("forward" in vars(module) and PACKED not in vars(module) for module in new):
        return False  # hooked already, such as a rank's shard
    needed = sum(module.weight.numel() * 4 for module in new)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > MEMORY_SHARE * memory:
        log.info("weights are not packed for CPU products: a copy would take %d of %d MiB", needed >> 20, memory >> 20)
        return False
    for module in new:
        weight = module.weight.detach()
        weight_OI = weight if type(module) is nn.Linear else weight.T.contiguous()
        bias = None if module.bias is None else module.bias.detach()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACKED_FOR)
        if PACKED not in vars(module):
            module.forward = MethodType(_forward, module)
        vars(module)[PACKED] = _Packed(packed, bias)
    return True


def drop_packed(model: PreTrainedModel) -> None:
    """Free the packed weights. They must not be used any more, until they are packed again."""
    for module in model.modules():
        found = vars(module).get(PACKED)
        if found is not None:
            found.weight = found.bias = None


class PackedBase(Protocol):
    """The part of `Base` that `choose_rows` needs."""

    model: PreTrainedModel
    packed_rows: tuple[int, ...]

    @property
    def forward(self) -> Callable[..., Tensor]: ...


def choose_rows(base: PackedBase, ids_T: Tensor) -> None:
    """Set the base's `packed_rows` so that a row's logits have the same bits in batches of several sizes, or drop the
    packed weights. `ids_T`: `CHECKED_ROWS` token ids."""
    for base.packed_rows in PACKED_ROWS:
        if _rows_are_independent(base.forward, ids_T):
            return
    log.info("weights are not packed for CPU products: a row's bits would depend on the batch")
    base.packed_rows = ()
    drop_packed(base.model)


@torch.no_grad()
def _rows_are_independent(forward: Callable[..., Tensor], ids_T: Tensor) -> bool:
    positions_T = torch.arange(CHECKED_ROWS)
    every, *few = (
        forward(ids_T[:rows], positions_T[:rows], OwnValues(), lora=None, keep=None) for rows in (CHECKED_ROWS, 1, 3, 7)
    )
    return all(torch.equal(logits, every[: len(logits)]) for logits in few)


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    """The `forward` of a packed module: its class's own, unless the running forward uses packed weights. Tracing must
    not read the context, and compiled layers run on a GPU."""
    if torch.compiler.is_dynamo_compiling() or not current.context.packed:
        own: Tensor = type(module).forward(module, x)
        return own
    packed: _Packed = vars(module)[PACKED]
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed.weight, packed.bias, "none", [], "")
    return y
