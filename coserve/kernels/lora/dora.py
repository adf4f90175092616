"""DoRA (Liu et al. 2024, https://arxiv.org/abs/2402.09353): LoRA terms, and a factor for each output feature.

    y = scale (x Wᵀ + scaling (x Aᵀ) Bᵀ) + bias,   scale = magnitude / ‖W + scaling B A‖, row by row

The norm is a constant in the backward, as in the paper (section 4.3) and in PEFT. So the terms are those of plain LoRA,
and the factor is one more pass over the rows of DoRA adapters. All backends share it; other rows keep their bits.

Letters: T tokens, D inputs, O outputs, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coserve.kernels.lora.interface import Adapters, PreparedLora
from coserve.kernels.lora.latent import HeadSizes
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import FrozenWeight, LoraPair, SiteGroup


class Scaled(NamedTuple):
    """The rows of one DoRA adapter, and its pair at one site."""

    runs: Sequence[tuple[int, int]]
    pair: LoraPair

    @property
    def scale_O(self) -> Tensor:  # noqa: N802
        assert self.pair.scale_O is not None, "expected a DoRA pair"
        return self.pair.scale_O


def squared_rows(weight_OD: Tensor) -> Tensor:
    """Return the squared norms of the rows of W: fp32 (O)."""
    squares_O: Tensor = torch.linalg.vector_norm(weight_OD, dim=1, dtype=torch.float32).square()
    return squares_O


def squared_norms(weight_OD: Tensor, pair: LoraPair, squares_O: Tensor | None = None) -> Tensor:
    """Return the squared norms of the rows of `W + scaling B A`: fp32 (O). Over columns of W and A they add up.

    `‖w‖² + 2 scaling b·(A w) + scaling² b·(A Aᵀ b)` for a row w of W and b of B: B A is never formed. `squares_O`:
    `squared_rows` of W, if they are known.
    """
    a_RD, b_OR = pair.a_RD.detach(), pair.b_OR.detach().float()
    crossed_OR = (weight_OD @ a_RD.T.to(weight_OD.dtype)).float()
    gram_RR = a_RD.float() @ a_RD.float().T
    terms_OR = 2 * pair.scaling * crossed_OR + pair.scaling**2 * (b_OR @ gram_RR)
    own_O = squared_rows(weight_OD) if squares_O is None else squares_O
    return (own_O + (b_OR * terms_OR).sum(1)).clamp_(min=0)


def with_scales(
    lora: PreparedLora, segments: Segments, adapters: Adapters, biases: Mapping[str, Tensor | None]
) -> PreparedLora:
    """Return `lora`, wrapped in `ScaledLora` if an adapter with tokens in the batch is DoRA. `biases`: by site."""
    if any(pair.scale_O is not None for index in segments.runs for pair in adapters[index].values()):
        return ScaledLora(lora, segments, adapters, biases)
    return lora


class ScaledLora(PreparedLora):
    """A backend's terms, after which the rows of DoRA adapters are scaled."""

    def __init__(
        self, inner: PreparedLora, segments: Segments, adapters: Adapters, biases: Mapping[str, Tensor | None]
    ) -> None:
        self._inner, self._segments, self._adapters, self._biases = inner, segments, adapters, biases
        self.anchor = inner.anchor

    @property
    def sums_gradients(self) -> bool:
        return self._inner.sums_gradients

    def changes(self, group: SiteGroup) -> bool:
        return self._inner.changes(group)

    def scales(self, group: SiteGroup) -> bool:
        return any(self._scaled(name) for name in group.names)

    def scale_(self, group: SiteGroup, ys: Sequence[Tensor]) -> None:
        for name, y in zip(group.names, ys, strict=True):
            _scale_(y, self._scaled(name), self._biases[name])

    def add_query_terms(self, group: SiteGroup, y_HTL: Tensor, q_HTN: Tensor, sizes: HeadSizes) -> None:
        self._inner.add_query_terms(group, y_HTL, q_HTN, sizes)

    def add_output_terms(self, group: SiteGroup, y_HTE: Tensor, x_HTL: Tensor, sizes: HeadSizes) -> None:
        self._inner.add_output_terms(group, y_HTE, x_HTL, sizes)

    def for_batch(self, segments: Segments) -> ScaledLora | None:
        inner = self._inner.for_batch(segments)
        return None if inner is None else ScaledLora(inner, segments, self._adapters, self._biases)

    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        return self._all(group, self._inner.add(group, ys, x_TD))

    def linear_group(self, group: SiteGroup, x_TD: Tensor, stacked: FrozenWeight) -> tuple[Tensor, ...]:
        return tuple(self._all(group, self._inner.linear_group(group, x_TD, stacked)))

    def linear_forward(
        self, group: SiteGroup, x_TD: Tensor, stacked: FrozenWeight, *, keep: bool
    ) -> tuple[Tensor, object]:
        y_TO, kept = self._inner.linear_forward(group, x_TD, stacked, keep=keep)
        if not self.scales(group):
            return y_TO, kept
        unscaled_TO = y_TO.clone() if keep else None
        for name, part_TO in zip(group.names, torch.split(y_TO, list(stacked.sizes), 1), strict=True):
            _scale_(part_TO, self._scaled(name), self._biases[name])
        return y_TO, (kept, unscaled_TO) if keep else None

    def linear_backward(
        self, group: SiteGroup, dy_TO: Tensor, x_TD: Tensor, kept: object, stacked: FrozenWeight
    ) -> Tensor:
        if isinstance(kept, tuple):
            kept, unscaled_TO = kept
            dy_TO = dy_TO.clone()
            parts = torch.split(dy_TO, list(stacked.sizes), 1), torch.split(unscaled_TO, list(stacked.sizes), 1)
            for name, dy, y in zip(group.names, *parts, strict=True):
                scaled = self._scaled(name)
                _add_to_sums(scaled, _scale_backward_(dy, y, scaled, self._biases[name]))
        return self._inner.linear_backward(group, dy_TO, x_TD, kept, stacked)

    def _all(self, group: SiteGroup, ys: Sequence[Tensor]) -> list[Tensor]:
        return [self._site(self._scaled(name), y, self._biases[name]) for name, y in zip(group.names, ys, strict=True)]

    def _site(self, scaled: Sequence[Scaled], y_TO: Tensor, bias_O: Tensor | None) -> Tensor:
        scales = [one.scale_O for one in scaled]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (y_TO, *scales)) and scaled:
            found: Tensor = _Scale.apply(y_TO, bias_O, scaled, self.anchor is not None, *scales)  # type: ignore[no-untyped-call]
            return found
        _scale_(y_TO, scaled, bias_O)
        return y_TO

    def _scaled(self, site: str) -> list[Scaled]:
        found = []
        for index, runs in self._segments.runs.items():
            pair = self._adapters[index].get(site)
            if pair is not None and pair.scale_O is not None:
                found.append(Scaled(runs, pair))
        return found


def _scale_(y_TO: Tensor, scaled: Sequence[Scaled], bias_O: Tensor | None) -> None:
    """`y = scale (y - bias) + bias` in place for the adapters' rows, in fp32."""
    for one in scaled:
        for start, end in one.runs:
            own = y_TO[start:end].float()
            plain = own if bias_O is None else own - bias_O
            own = plain * one.scale_O
            y_TO[start:end] = own if bias_O is None else own + bias_O


def _scale_backward_(dy_TO: Tensor, y_TO: Tensor, scaled: Sequence[Scaled], bias_O: Tensor | None) -> list[Tensor]:
    """Turn `dy_TO` into the gradient of the unscaled `y_TO`, in place; return those of the scales, fp32 (O) each."""
    found = []
    for one in scaled:
        total_O = torch.zeros_like(one.scale_O)
        for start, end in one.runs:
            dy, y = dy_TO[start:end].float(), y_TO[start:end].float()
            total_O += (dy * (y if bias_O is None else y - bias_O)).sum(0)
            dy_TO[start:end] = dy * one.scale_O
        found.append(total_O)
    return found


def _add_to_sums(scaled: Sequence[Scaled], gradients: Sequence[Tensor]) -> None:
    for one, gradient_O in zip(scaled, gradients, strict=True):
        if one.pair.main_grads is not None and one.pair.main_grads.scale_O is not None:
            one.pair.main_grads.scale_O.add_(gradient_O)


class _Scale(torch.autograd.Function):
    """The autograd function of `_scale_`, into new memory."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own signature
        y: Tensor,
        bias: Tensor | None,
        scaled: Sequence[Scaled],
        sums: bool,
        *scales: Tensor,
    ) -> Tensor:
        """`sums`: the backward adds the scales' gradients to their `MainGrads` and returns none."""
        ctx.bias, ctx.scaled, ctx.sums = bias, scaled, sums
        ctx.save_for_backward(y)
        out = y.clone()
        _scale_(out, scaled, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # noqa: ANN401 - torch's own signature
        (y,) = ctx.saved_tensors
        dy = dy.clone()
        found = _scale_backward_(dy, y, ctx.scaled, ctx.bias)
        if not ctx.sums:
            return (dy, None, None, None, *found)
        _add_to_sums(ctx.scaled, found)
        return (dy, None, None, None, *[None] * len(found))
