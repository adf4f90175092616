"""Keys and values that layers of a pass read from earlier layers, between these layers' autograd graphs.

H query heads, K key/value heads, T packed tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from coserve.kernels.attention.interface import Attention, AttentionParams


class CarriedKv:
    """The batch's attention, in which a layer that reads an earlier layer's keys and values reads leaves instead.

    So every layer has its own autograd graph. The leaves collect the gradients of all layers that read them, and the
    backward of the layer that made them, which comes last, begins with these, too.
    """

    def __init__(self, inner: Attention, sources: Mapping[int, int], first: int) -> None:
        """`sources`: the source of each layer that reads another's keys and values. `first`: the lowest trained layer;
        keys and values of those below need no gradients."""
        self._inner, self._sources, self._first = inner, sources, first
        self._read = frozenset(sources.values())
        self._made: tuple[Tensor, ...] = ()
        self._leaves: dict[int, tuple[Tensor, ...]] = {}

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        """See `Attention.attend`."""
        if layer in self._sources:
            k_KTD, v_KTD = self._leaves[self._sources[layer]]
        elif layer in self._read:
            self._made = k_KTD, v_KTD
        return self._inner.attend(layer, q_HTD, k_KTD, v_KTD, params)

    def take(self, layer: int) -> tuple[Tensor, ...]:
        """Return the keys and values that the layer has just made, as it gave them to `attend`; nothing if no other
        layer reads them. The first time, make the leaves; when the backward runs the layer again, they stay."""
        made, self._made = self._made, ()
        if made and layer not in self._leaves:
            self._leaves[layer] = tuple(one.detach().requires_grad_(layer >= self._first) for one in made)
        return made

    def read_by(self, layer: int) -> tuple[Tensor, ...]:
        """Return the leaves that the layer reads and that need gradients: keys and values, or nothing."""
        leaves = self._leaves.get(self._sources.get(layer, -1), ())
        return tuple(leaf for leaf in leaves if leaf.requires_grad)

    def gradients(self, layer: int, made: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return those of a layer's keys and values that depend on what is trained, each with the gradient that the
        layers above have collected, and forget these."""
        leaves = self._leaves.pop(layer, ())
        both = [(one, leaf.grad) for one, leaf in zip(made, leaves, strict=True) if one.requires_grad]
        return [(one, gradient) for one, gradient in both if gradient is not None]


def collect(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to those that the leaves have collected. None: a leaf did not contribute."""
    for leaf, gradient in zip(leaves, gradients, strict=False):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
