"""Hooks attention: transformers calls our function. Importing this module registers the name `coserve`.

Shape letters: T packed tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from coserve.core.errors import UnsupportedBase
from coserve.kernels.attention.interface import Attention, AttentionParams, reads_pages
from coserve.kernels.recurrent.packed import PackedRecurrence
from coserve.model.latent import absorbed

NAME = "coserve"
ARGUMENT = "coserve_attention"
"""Name of the model's argument that its layers hand on to attention."""

_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "attention_type",
        "layer_type",
    }
)
"""Arguments that families pass on to attention and that do not change its result."""


CHUNK, TUNED = "coserve_chunk", "coserve_tuned"
"""Attributes of attention modules: the chunk whose tokens alone a token sees (`Window.chunked`), as the module's mask
says; and see `take_over_tuning`."""


def _attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    attention_mask: Tensor | None,
    *,
    coserve_attention: Attention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    coserve_positions: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer. Raises `UnsupportedBase` for arguments that it does
    not implement."""
    family = type(module).__name__
    if coserve_attention is None:
        raise UnsupportedBase(f"{family} does not hand its arguments on to attention")
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)
    if unknown:
        raise UnsupportedBase(
            f"{family} asks for attention with {', '.join(unknown)}, which coserve does not implement"
        )
    if attention_mask is not None:
        raise UnsupportedBase(f"{family} makes its own attention mask, which coserve does not implement")
    if is_causal is False:
        raise UnsupportedBase(f"{family} asks for attention that is not causal")
    if dropout:
        raise UnsupportedBase(f"{family} asks for attention dropout")
    if coserve_positions is not None and hasattr(module, TUNED):
        query_1HTD = _tuned(module, query_1HTD, coserve_positions)
    chunk: int | None = getattr(module, CHUNK, None)
    params = AttentionParams(
        scaling=query_1HTD.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window if chunk is None else chunk,
        softcap=softcap,
        sinks=s_aux,
        chunked=chunk is not None,
    )
    layer = -1 if getattr(coserve_attention, "any_layer", False) else layer_of(module)
    q_HTD, k_KTD, v_KTD = query_1HTD[0], key_1KTD[0], value_1KTD[0]
    if hasattr(module, absorbed.SIZES):
        if reads_pages(coserve_attention):
            return absorbed.attend(module, coserve_attention, layer, q_HTD, k_KTD, v_KTD, params)[None], None
        k_KTD, v_KTD = absorbed.expand(module, k_KTD, v_KTD)
    if k_KTD.shape[-1] != q_HTD.shape[-1]:
        sizes = f"{q_HTD.shape[-1]} and {k_KTD.shape[-1]}"
        raise UnsupportedBase(f"{family}: expected heads of one size for queries and keys, got {sizes}")
    out_THD = coserve_attention.attend(layer, q_HTD, k_KTD, v_KTD, params)
    return out_THD.contiguous()[None], None  # some families take a view of it


def take_over_tuning(modules: Iterable[nn.Module]) -> bool:
    """Scale the queries of Llama 4's layers without rotary positions in our attention instead of in the layers, which
    would take a token's row in the packed batch for its position. Returns whether there are such layers; forwards then
    need `coserve_positions`."""
    tuned = [
        one for one in modules if getattr(one, "attn_temperature_tuning", False) and not getattr(one, "use_rope", 1)
    ]
    for module in tuned:
        vars(module).update({"attn_temperature_tuning": False, TUNED: True})
    return any(hasattr(one, TUNED) for one in modules)


def _tuned(module: nn.Module, query_1HTD: Tensor, positions_T: Tensor) -> Tensor:
    """Compute `Llama4TextAttention`'s scaling of queries, which grows with the position (Nakanishi '25)."""
    floor, scale = cast("float", module.floor_scale), cast("float", module.attn_scale)
    scales_T = torch.log1p(torch.floor((positions_T.float() + 1.0) / floor)) * scale + 1.0
    return (query_1HTD * scales_T[:, None]).to(query_1HTD.dtype)


def layer_of(module: nn.Module) -> int:
    """Return the index of the decoder layer that an attention module belongs to."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedBase(f"{type(module).__name__} does not know the index of its layer")
    return layer


class ReferenceAttention:
    """Plain causal attention within each packed sequence, no cache: slow and obvious, for checks at start and tests.

    `bounds` (B+1) ascends from 0 to T.
    """

    def __init__(self, bounds: tuple[int, ...], *, reads_pages: bool = False) -> None:
        """`reads_pages`: get what attention over a cache gets."""
        self._bounds, self.reads_pages = bounds, reads_pages
        self.recurrence = PackedRecurrence(bounds)

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        scaling, _, softcap, sinks, _ = params
        groups = q_HTD.shape[0] // k_KTD.shape[0]
        k_HTD, v_HTD = k_KTD.repeat_interleave(groups, 0), v_KTD.repeat_interleave(groups, 0)
        outputs = []
        for start, end in zip(self._bounds, self._bounds[1:], strict=False):
            rows = slice(start, end)
            scores_HTT = (q_HTD[:, rows].float() @ k_HTD[:, rows].float().mT) * scaling
            if softcap is not None:
                scores_HTT = softcap * torch.tanh(scores_HTT / softcap)
            query = torch.arange(end - start, device=q_HTD.device)[:, None]
            seen = query >= query.T
            if params.seen is not None:
                seen = seen & (params.seen.first(query) <= query.T)
            scores_HTT = scores_HTT.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                sink_HT1 = sinks.float()[:, None, None].expand(-1, end - start, 1)
                scores_HTT = torch.cat([scores_HTT, sink_HT1], dim=-1)
            weights_HTT = scores_HTT.softmax(dim=-1)[..., : end - start]
            outputs.append((weights_HTT @ v_HTD[:, rows].float()).to(q_HTD.dtype).transpose(0, 1))
        return torch.cat(outputs)


AttentionInterface.register(NAME, _attention)
