"""Multi-head latent attention (MLA) over a cache of latents (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section
2.1).

MLA compresses a token to a latent, from which `kv_b_proj` makes the keys and values of all heads; besides, all heads
share one small key that carries the rotary position. Pages hold the latent and that key, as of one key/value head: the
queries absorb `W_UK`, the key rows of `kv_b_proj`, and attention's outputs are projected by `W_UV`, its value rows,
LoRA terms included (`kernels.lora.latent`). Long prompt chunks make keys and values of all heads from the latents of
their contexts instead (`kernels.attention.expanded`). Without a cache (training, checks) `expand_kv`, transformers'
method, makes them.

Letters, with the config's names: T tokens, H heads, L numbers of a latent (`kv_lora_rank`), P of the key with a
position (`qk_rope_head_dim`), N of the other part of a head's key (`qk_nope_head_dim`), E of a head's value
(`v_head_dim`); O = N + E.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from coserve.kernels.attention.expanded import expanded_of
from coserve.kernels.attention.interface import Attention, AttentionFields, AttentionParams, KvShape
from coserve.kernels.lora.interface import PreparedLora
from coserve.kernels.lora.latent import HeadSizes, multiply_heads
from coserve.kernels.lora.types import SiteGroup
from coserve.model.forward_context import ATTENTION_FIELDS, current, register_ops, running_fused
from coserve.model.lora import group_of, shared_of, site_shape
from coserve.model.quantized.modules import QuantizedLinear

SIZES, WEIGHT = "coserve_latent_sizes", "coserve_latent_weight"
"""Attributes of a module that caches latents: its `HeadSizes`, and a copy of a quantised `kv_b_proj` dequantised, so
that steps need not make it."""
NAMES = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Attributes by which an attention module is recognised as MLA. A forward checks that it computes as expected
(`base.wrap_base`)."""


class LatentAttention(Protocol):
    """The part of transformers' MLA modules that is used here."""

    kv_b_proj: nn.Module
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int

    @staticmethod
    def expand_kv(module: nn.Module, latents: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(1, 1, T, L) and rotated (1, 1, T, P) -> keys (1, H, T, N + P) and values (1, H, T, E)."""
        ...


def latent_shapes(attention: Sequence[nn.Module], shapes: Sequence[KvShape]) -> list[KvShape]:
    """Return the shapes of a cache of latents, or `shapes` unless every attention module can cache latents. `shapes`:
    of all layers, with zeros for those without attention."""
    if not attention or not all(map(_is_latent, attention)):
        return list(shapes)
    found = map(_shape, attention)
    return [next(found) if one.heads else one for one in shapes]


def heads_note(attention: Sequence[nn.Module], setting: str) -> str:
    """Say for an operator that MLA modules cache keys and values of all heads, or that there are none; else empty.
    `setting`: the one that demands heads; empty: none."""
    latent = [module for module in attention if _has_latents(module)]
    if setting == "mla_cache" and not latent:
        return "mla_cache has no effect: the base has no multi-head latent attention"
    why = setting or "a projection has a bias"
    kept = any(not hasattr(module, SIZES) for module in latent)
    return f"keys and values of all heads are cached, not latents ({why})" if kept else ""


def cache_latents(attention: Sequence[nn.Module], shapes: Sequence[KvShape]) -> list[KvShape]:
    """Return `latent_shapes`. If they are of latents, let the modules hand their latents to attention, for `expand` or
    `absorb`."""
    found = latent_shapes(attention, shapes)
    for module in attention if found != list(shapes) else ():
        layer = cast(LatentAttention, module)
        setattr(module, SIZES, HeadSizes(layer.qk_nope_head_dim, layer.v_head_dim))
        vars(module)["expand_kv"] = MethodType(_keep_compressed, module)
        if isinstance(layer.kv_b_proj, QuantizedLinear):
            module.register_buffer(WEIGHT, layer.kv_b_proj.weight, persistent=False)
    return found


def restore(model: nn.Module) -> None:
    """Undo `cache_latents` in all modules."""
    for module in model.modules():
        if hasattr(module, SIZES):
            delattr(module, SIZES)
            del vars(module)["expand_kv"]
            module._buffers.pop(WEIGHT, None)


def _has_latents(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in NAMES)


def _is_latent(module: nn.Module) -> bool:
    return _has_latents(module) and cast(LatentAttention, module).kv_b_proj.bias is None


def _shape(module: nn.Module) -> KvShape:
    layer = cast(LatentAttention, module)
    rank, projection = layer.kv_lora_rank, layer.kv_b_proj
    (outputs, _), like = site_shape(projection), next(module.parameters())
    nope, rope, value = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
    heads = outputs // (nope + value)
    numbers = outputs + heads * (nope + rope + value) if like.is_cuda else 0  # on CPU bits must not depend on the step
    return KvShape(1, rank + rope, rank, latent=True, expanded=numbers * like.dtype.itemsize)


def _keep_compressed(module: nn.Module, latents: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for `expand_kv`: return its arguments as one head's key and value."""
    return positions, latents


def expand(module: nn.Module, k_1TP: Tensor, latents_1TL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys (H, T, N + P) and values (H, T, E) of all heads, from what `_keep_compressed` returned."""
    expand_kv = cast("type[LatentAttention]", type(module)).expand_kv
    k_1HTD, v_1HTE = expand_kv(module, latents_1TL[None], k_1TP[None])
    return k_1HTD[0], v_1HTE[0]


def attend(
    module: nn.Module,
    attention: Attention,
    layer: int,
    q_HTD: Tensor,
    k_1TP: Tensor,
    latents_1TL: Tensor,
    params: AttentionParams,
) -> Tensor:
    """Return attention's outputs (T, H, E) over a cache of latents, by queries of N + P numbers and by what
    `_keep_compressed` returned. Expands the contexts of long chunks if `attention` has some."""
    sizes, weight_HOL = _given(module)
    k_1TD = torch.cat((latents_1TL, k_1TP), -1)
    if torch.compiler.is_dynamo_compiling() or current.context.fused is not None:
        out: Tensor = torch.ops.coserve.attend_latents(q_HTD, k_1TD, weight_HOL, *sizes, _index(module), *params)
        return out
    return _attend(attention, layer, q_HTD, k_1TD, weight_HOL, sizes, _group(module), params)


def _given(module: nn.Module) -> tuple[HeadSizes, Tensor]:
    """Return the sizes of a head, and the weight of `kv_b_proj` by heads (H, O, L)."""
    sizes, projection = cast(HeadSizes, getattr(module, SIZES)), cast(LatentAttention, module).kv_b_proj
    weight = cast(Tensor, getattr(module, WEIGHT) if isinstance(projection, QuantizedLinear) else projection.weight)
    return sizes, weight.view(-1, sum(sizes), weight.shape[1])


def _index(module: nn.Module) -> int:
    shared = shared_of(cast(LatentAttention, module).kv_b_proj)
    assert shared is not None, "expected a projection in a group"
    return shared.index


def _group(module: nn.Module) -> SiteGroup:
    return group_of(cast(LatentAttention, module).kv_b_proj)


@torch.no_grad()
def _attend(
    attention: Attention,
    layer: int,
    q_HTD: Tensor,
    k_1TD: Tensor,
    weight_HOL: Tensor,
    sizes: HeadSizes,
    group: SiteGroup,
    params: AttentionParams,
) -> Tensor:
    lora, expanded = current.context.lora, expanded_of(attention)
    if lora is not None and not lora.changes(group):
        lora = None

    def absorbed(attention: Attention, q_HTD: Tensor, k_1TD: Tensor, lora: PreparedLora | None) -> Tensor:
        q_HTD = _absorb_queries(q_HTD, weight_HOL, sizes, group, lora)
        out_THL = attention.attend(layer, q_HTD, k_1TD, k_1TD[..., : weight_HOL.shape[2]], params)
        return _project_values(out_THL, weight_HOL, sizes, group, lora)

    if expanded is None:
        return absorbed(attention, q_HTD, k_1TD, lora)
    out_THE = q_HTD.new_zeros(q_HTD.shape[1], q_HTD.shape[0], sizes.value)
    own = None if lora is None else group
    out_THE[expanded.rows] = expanded.attend_chunks(layer, q_HTD, k_1TD, weight_HOL, sizes, own, params)
    if expanded.others is not None:
        rows, terms = expanded.other_rows, None if lora is None else expanded.other_terms
        out_THE[rows] = absorbed(expanded.others, q_HTD[:, rows], k_1TD[:, rows], terms)
    return out_THE


def _absorb_queries(
    q_HTD: Tensor, weight_HOL: Tensor, sizes: HeadSizes, group: SiteGroup, lora: PreparedLora | None
) -> Tensor:
    """Return each head's `W_UKᵀ q`, and behind it the part of q with a position: (H, T, N + P) -> (H, T, L + P)."""
    heads, tokens, _ = q_HTD.shape
    q_HTN, q_HTP = q_HTD[..., : sizes.nope], q_HTD[..., sizes.nope :]
    if lora is not None and lora.scales(group):  # DoRA's factors are those of W's rows
        x_THO = q_HTD.new_zeros(tokens, heads, sum(sizes))
        x_THO[..., : sizes.nope] = q_HTN.transpose(0, 1)
        lora.scale_(group, [x_THO.flatten(1)])
        q_HTN = x_THO[..., : sizes.nope].transpose(0, 1)
    y_HTL = multiply_heads(q_HTN, weight_HOL[:, : sizes.nope])
    if lora is not None:
        lora.add_query_terms(group, y_HTL, q_HTN, sizes)
    return torch.cat((y_HTL, q_HTP), -1)


def _project_values(
    x_THL: Tensor, weight_HOL: Tensor, sizes: HeadSizes, group: SiteGroup, lora: PreparedLora | None
) -> Tensor:
    """Return each head's `W_UV x`: (T, H, L) -> (T, H, E)."""
    tokens, heads, _ = x_THL.shape
    x_HTL = x_THL.transpose(0, 1)
    y_HTE = multiply_heads(x_HTL, weight_HOL[:, sizes.nope :].mT)
    if lora is not None:
        lora.add_output_terms(group, y_HTE, x_HTL, sizes)
        if lora.scales(group):
            y_THO = x_THL.new_zeros(tokens, heads, sum(sizes))
            y_THO[..., sizes.nope :] = y_HTE.transpose(0, 1)
            lora.scale_(group, [y_THO.flatten(1)])
            return y_THO[..., sizes.nope :].contiguous()
    return y_HTE.transpose(0, 1).contiguous()


def _fused_attend(
    q_HTD: Tensor,
    k_1TD: Tensor,
    weight_HOL: Tensor,
    nope: int,
    value: int,
    group: int,
    *params: *AttentionFields,
) -> Tensor:
    fused, layer = running_fused(), current.layer
    sites, sizes = fused.groups[layer][group], HeadSizes(nope, value)
    return _attend(fused.attention, layer, q_HTD, k_1TD, weight_HOL, sizes, sites, AttentionParams(*params))


_OPS = register_ops(
    (
        "attend_latents",
        f"(Tensor q, Tensor k, Tensor weight, int nope, int value, int group, {ATTENTION_FIELDS}) -> Tensor",
        _fused_attend,
        lambda q, k, weight, nope, value, *_: q.new_empty((q.shape[1], q.shape[0], value)),
    ),
)
