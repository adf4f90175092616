"""Multi-head latent attention over a cache of latents (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

Layers of these families compress a token to a latent, from which `kv_b_proj` makes the keys and values of all heads; a
small key with a rotary position is shared by the heads. Transformers calls a method of the layer, `expand_kv`, for it.
Over pages the latents stay as they are: they are cached, as keys and values of one head, and the projection is absorbed
by the queries and by the outputs, LoRA terms included (`kernels.lora.latent`). Where nothing is cached (training and
checks), heads are expanded as the model does it.

Letters: T tokens, H heads, L numbers of a latent, P of the key with a position, N and E of a head's other keys and
values; D = L + P.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from coserve.kernels.attention.interface import KvShape
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.latent import HeadSizes, product
from coserve.kernels.lora.types import SiteGroup
from coserve.model.forward_context import current, register_ops, running_fused
from coserve.model.lora import group_of, shared_of
from coserve.model.quantized.modules import QuantizedLinear

SIZES, WEIGHT = "coserve_latent_sizes", "coserve_latent_weight"
"""Attributes of a layer that caches latents: its `HeadSizes`, and a quantised projection's dequantised weight, which
steps need not make again then."""
NAMES = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Attributes of an attention module by which it is told to have latents; whether it computes with them as expected is
checked by a forward (`base.wrap_base`)."""


class LatentAttention(Protocol):
    """The part of transformers' modules that is used here."""

    kv_b_proj: nn.Module
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int

    @staticmethod
    def expand_kv(module: nn.Module, latents: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]: ...


def latent_shapes(attention: Sequence[nn.Module], shapes: Sequence[KvShape]) -> list[KvShape]:
    """Return the shapes of a cache of latents, or `shapes` if not every attention module has some. `shapes`: of all
    layers, with zeros for those without attention."""
    if not attention or not all(map(_is_latent, attention)):
        return list(shapes)
    found = map(_shape, attention)
    return [next(found) if one.heads else one for one in shapes]


def heads_note(attention: Sequence[nn.Module]) -> str:
    """Say for an operator that modules with latents cache keys and values of all heads; empty if none does."""
    kept = any(_has_latents(module) and not hasattr(module, SIZES) for module in attention)
    return "heads' keys and values are cached, not latents" if kept else ""


def cache_latents(attention: Sequence[nn.Module], shapes: Sequence[KvShape]) -> list[KvShape]:
    """Return `latent_shapes`. If they are of latents, let the modules hand theirs to attention, which expands or
    absorbs them (`entering`)."""
    found = latent_shapes(attention, shapes)
    for module in attention if found != list(shapes) else ():
        layer = cast(LatentAttention, module)
        setattr(module, SIZES, HeadSizes(layer.qk_nope_head_dim, layer.v_head_dim))
        vars(module)["expand_kv"] = MethodType(_not_expanded, module)
        if isinstance(layer.kv_b_proj, QuantizedLinear):
            module.register_buffer(WEIGHT, layer.kv_b_proj.weight, persistent=False)
    return found


def _has_latents(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in NAMES)


def _is_latent(module: nn.Module) -> bool:
    return _has_latents(module) and cast(LatentAttention, module).kv_b_proj.bias is None


def _shape(module: nn.Module) -> KvShape:
    layer = cast(LatentAttention, module)
    rank = layer.kv_lora_rank
    return KvShape(1, rank + layer.qk_rope_head_dim, rank, latent=True)


def _not_expanded(module: nn.Module, latents: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for `expand_kv`: the key with a position and the latent, instead of all heads' keys and values."""
    return positions, latents


def entering(
    module: nn.Module, q_HTD: Tensor, k_1TP: Tensor, v_1TL: Tensor, *, absorb: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values for attention, from the queries and what `_not_expanded` returned: of all heads,
    or with `absorb` of one head that is cached, (H, T, D), (1, T, D) and (1, T, L)."""
    if not absorb:
        expand = cast("type[LatentAttention]", type(module)).expand_kv
        k_1HTD, v_1HTE = expand(module, v_1TL[None], k_1TP[None])
        return q_HTD, k_1HTD[0], v_1HTE[0]
    sizes, weight_OL = _given(module)
    if torch.compiler.is_dynamo_compiling() or current.context.fused is not None:
        q_HTD = torch.ops.coserve.absorb_queries(q_HTD, weight_OL, *sizes, _index(module))
    else:
        q_HTD = _queries(q_HTD, weight_OL, sizes, _group(module), current.context.lora)
    return q_HTD, torch.cat((v_1TL, k_1TP), -1), v_1TL


def leaving(module: nn.Module, out_THL: Tensor) -> Tensor:
    """Return the heads' outputs (T, H, E) of attention over latents."""
    sizes, weight_OL = _given(module)
    if torch.compiler.is_dynamo_compiling() or current.context.fused is not None:
        out: Tensor = torch.ops.coserve.absorb_outputs(out_THL, weight_OL, *sizes, _index(module))
        return out
    return _outputs(out_THL, weight_OL, sizes, _group(module), current.context.lora)


def _given(module: nn.Module) -> tuple[HeadSizes, Tensor]:
    projection = cast(LatentAttention, module).kv_b_proj
    weight = getattr(module, WEIGHT) if isinstance(projection, QuantizedLinear) else projection.weight
    return cast(HeadSizes, getattr(module, SIZES)), cast(Tensor, weight)


def _index(module: nn.Module) -> int:
    shared = shared_of(cast(LatentAttention, module).kv_b_proj)
    assert shared is not None, "expected a projection in a group"
    return shared.index


def _group(module: nn.Module) -> SiteGroup:
    return group_of(cast(LatentAttention, module).kv_b_proj)


@torch.no_grad()
def _queries(q_HTD: Tensor, weight_OL: Tensor, sizes: HeadSizes, group: SiteGroup, lora: PreparedLora | None) -> Tensor:
    """Return `W_Kᵀ q` of each head, and the part of q with a position: (H, T, N + P) -> (H, T, L + P)."""
    heads, tokens, _ = q_HTD.shape
    q_HTN, q_HTP = q_HTD[..., : sizes.keys], q_HTD[..., sizes.keys :]
    changed = lora is not None and lora.changes(group)
    if lora is not None and changed and lora.scales(group):  # DoRA's factors are those of W's rows
        x_THO = q_HTD.new_zeros(tokens, heads, sum(sizes))
        x_THO[..., : sizes.keys] = q_HTN.transpose(0, 1)
        lora.scale_(group, [x_THO.flatten(1)])
        q_HTN = x_THO[..., : sizes.keys].transpose(0, 1)
    y_HTL = product(q_HTN, weight_OL.view(heads, sum(sizes), -1)[:, : sizes.keys])
    if lora is not None and changed:
        lora.add_query_terms(group, y_HTL, q_HTN, sizes)
    return torch.cat((y_HTL, q_HTP), -1)


@torch.no_grad()
def _outputs(x_THL: Tensor, weight_OL: Tensor, sizes: HeadSizes, group: SiteGroup, lora: PreparedLora | None) -> Tensor:
    """Return `W_V o` of each head: (T, H, L) -> (T, H, E)."""
    tokens, heads, _ = x_THL.shape
    x_HTL = x_THL.transpose(0, 1)
    y_HTE = product(x_HTL, weight_OL.view(heads, sum(sizes), -1)[:, sizes.keys :].mT)
    if lora is not None and lora.changes(group):
        lora.add_output_terms(group, y_HTE, x_HTL, sizes)
        if lora.scales(group):
            y_THO = x_THL.new_zeros(tokens, heads, sum(sizes))
            y_THO[..., sizes.keys :] = y_HTE.transpose(0, 1)
            lora.scale_(group, [y_THO.flatten(1)])
            return y_THO[..., sizes.keys :].contiguous()
    return y_HTE.transpose(0, 1).contiguous()


def _fused_queries(q_HTD: Tensor, weight_OL: Tensor, keys: int, values: int, group: int) -> Tensor:
    sites = running_fused().groups[current.layer][group]
    return _queries(q_HTD, weight_OL, HeadSizes(keys, values), sites, current.context.lora)


def _fused_outputs(x_THL: Tensor, weight_OL: Tensor, keys: int, values: int, group: int) -> Tensor:
    sites = running_fused().groups[current.layer][group]
    return _outputs(x_THL, weight_OL, HeadSizes(keys, values), sites, current.context.lora)


_SCHEMA = "(Tensor x, Tensor weight, int keys, int values, int group) -> Tensor"
_OPS = register_ops(
    (
        "absorb_queries",
        _SCHEMA,
        _fused_queries,
        lambda q, weight, keys, *_: q.new_empty((*q.shape[:2], q.shape[2] - keys + weight.shape[1])),
    ),
    (
        "absorb_outputs",
        _SCHEMA,
        _fused_outputs,
        lambda x, weight, keys, values, _: x.new_empty((*x.shape[:2], values)),
    ),
)
