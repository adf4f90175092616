"""The interface of LoRA backends: preparing one step's adapter terms, and adding them at the base's sites."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from coserve.core.errors import ConfigError
from coserve.kernels.gpu.device import interpreted
from coserve.kernels.lora.experts.interface import ExpertLora, RemoteTerms
from coserve.kernels.lora.latent import HeadSizes, add_output_terms, add_query_terms
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import FrozenWeight, LoraPair, SiteGroup

Adapters = Sequence[Mapping[str, LoraPair]]
"""For each adapter, its pair at each site that it changes, by the site's name."""


class PreparedLora(ABC):
    """The LoRA terms of one step: `y + scaling_a (x a_RDᵀ) b_ORᵀ` for the adapter `a` of each token.

    Holds all that a backend derives from the step's segments and adapters, for all sites and layers.
    """

    anchor: Tensor | None = None
    """Dummy leaf that triggers our backward in the lowest trainable layer; it gets no gradient.

    Set if the kernels add gradients to the pairs' `MainGrads`, so that autograd returns none for the pairs.
    """

    experts: ExpertLora | None = None
    """Terms of experts' parameters, which are no sites of groups; None: no adapter of the step changes any."""

    remote: RemoteTerms | None = None
    """Terms of experts' parameters that LoRA servers compute; None: none of the step's."""

    @property
    def sums_gradients(self) -> bool:
        """Whether `linear_backward` adds the gradients of all pairs to their `MainGrads`."""
        return self.anchor is not None

    @abstractmethod
    def changes(self, group: SiteGroup) -> bool:
        """Whether an adapter of the step changes a site of the group."""

    @abstractmethod
    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        """Return `ys[i]` (T, O_i) plus the terms of the group's i-th site.

        Differentiable in ys, x and every a_RD and b_OR; may write into ys if no gradient is required.
        """

    def add_(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, overlapped: bool = False) -> None:
        """`add` in place, without gradients.

        `overlapped`: the preceding kernel is a GEMM that allows early launch: x is readable, its workspace is still
        busy.
        """
        for y, added in zip(ys, self.add(group, ys, x_TD), strict=True):
            if added is not y:
                y.copy_(added)

    def add_query_terms(self, group: SiteGroup, y_HTL: Tensor, q_HTN: Tensor, sizes: HeadSizes) -> None:
        """Add the terms of latent attention's absorbed queries in place (`kernels.lora.latent`), without gradients.
        Only for a group of one site that an adapter changes."""
        raise NotImplementedError(f"{type(self).__name__} has no terms of latent attention")

    def add_output_terms(self, group: SiteGroup, y_HTE: Tensor, x_HTL: Tensor, sizes: HeadSizes) -> None:
        """Add the terms of latent attention's outputs, as `add_query_terms`."""
        raise NotImplementedError(f"{type(self).__name__} has no terms of latent attention")

    def scales(self, group: SiteGroup) -> bool:
        """Whether some adapters of the step may be DoRA at the group's sites."""
        return False

    def scale_(self, group: SiteGroup, ys: Sequence[Tensor]) -> None:
        """Multiply the rows of DoRA adapters by their factors in place, as after the terms: (T, O_i) each."""
        raise NotImplementedError(f"{type(self).__name__} has no factors of DoRA")

    def linear_group(self, group: SiteGroup, x_TD: Tensor, stacked: FrozenWeight) -> tuple[Tensor, ...]:
        """Return each site's `x Wᵀ + bias` plus its terms: (T, O_i) each. Differentiable as `add` is, not in the
        weights."""
        y_TO = stacked.linear(x_TD)
        return tuple(self.add(group, torch.split(y_TO, list(stacked.sizes), 1), x_TD))

    def linear_forward(
        self, group: SiteGroup, x_TD: Tensor, stacked: FrozenWeight, *, keep: bool
    ) -> tuple[Tensor, object]:
        """Compute `linear_group` without autograd: (T, ΣO), and with `keep` what `linear_backward` needs."""
        y_TO = stacked.linear(x_TD)
        if not self.changes(group):
            return y_TO, None
        return y_TO, self.terms_forward(group, torch.split(y_TO, list(stacked.sizes), 1), x_TD, keep=keep)

    def linear_backward(
        self, group: SiteGroup, dy_TO: Tensor, x_TD: Tensor, kept: object, stacked: FrozenWeight
    ) -> Tensor:
        """Return the gradient of x, given that of `linear_forward`'s output. Adds the pairs' gradients to their
        `MainGrads`."""
        if kept is None:
            return stacked.backward(dy_TO)
        dys = torch.split(dy_TO, list(stacked.sizes), 1)
        return stacked.add_backward(self.terms_backward(group, dys, x_TD, kept), dy_TO)

    def terms_forward(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, keep: bool) -> object:
        """Compute `add_` without autograd for training; with `keep`, return what `terms_backward` needs.

        Only for groups that an adapter changes.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward of its own")

    def terms_backward(self, group: SiteGroup, dys: Sequence[Tensor], x_TD: Tensor, kept: object) -> Tensor:
        """Return the terms' contribution to the gradient of x, a new tensor. Adds the pairs' gradients to their
        `MainGrads`."""
        raise NotImplementedError(f"{type(self).__name__} has no backward of its own")

    def for_batch(self, segments: Segments) -> PreparedLora | None:
        """Return the terms of another batch with the same adapters, whose weights may have changed in place.

        None if they must be prepared anew.
        """
        return None

    @property
    def holds_weights(self) -> bool:
        """Whether it holds copies of weights, which take as much memory as its adapters."""
        return False

    @property
    def structure(self) -> Hashable | None:
        """Key of a training batch's launches: batches with equal keys differ only in addresses and contents of tables.

        None if they cannot be captured in a CUDA graph.
        """
        return None

    def fixed(self) -> FixedLora:
        """Return a copy whose launches can be captured. Requires a `structure`."""
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")


class FixedLora(PreparedLora):
    """A `PreparedLora` with fixed launches: captured in a CUDA graph, they serve whichever batch it took last."""

    @abstractmethod
    def take(self, lora: PreparedLora) -> None:
        """Switch to this batch, in stream order. It must have the same `structure` and number of tokens."""

    @abstractmethod
    def forget(self) -> None:
        """Release the batch that it took. Work already launched for it is not affected."""


class CombinedLora(PreparedLora):
    """The sum of several backends' terms, added one after another. Not for training with an `anchor`."""

    def __init__(self, parts: Sequence[PreparedLora]) -> None:
        self._parts = parts

    def changes(self, group: SiteGroup) -> bool:
        return any(part.changes(group) for part in self._parts)

    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        out = list(ys)
        for part in self._parts:
            out = part.add(group, out, x_TD) if part.changes(group) else out
        return out

    def add_(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor, *, overlapped: bool = False) -> None:
        for part in self._parts:
            if part.changes(group):
                part.add_(group, ys, x_TD, overlapped=overlapped)
                overlapped = False


class LoraBackend(ABC):
    """An implementation of LoRA terms."""

    name: str
    """Its value of the setting `lora_backend`."""
    capturable: bool = False
    """Whether steps can be captured in CUDA graphs."""
    groups_inputs: bool = False
    """Whether sites that read one input train faster together (`PreparedLora.linear_group`) than one by one."""
    one_adapter_a_step: bool = False
    """Whether generation runs one forward per adapter instead of one for all."""
    kept_bytes: int = 0
    """Most bytes of device memory that `keeping` keeps across steps."""

    def __repr__(self) -> str:
        return self.name

    def refuse_unusable(self, device: torch.device, dtype: torch.dtype) -> None:  # noqa: B027 - most run anywhere
        """Raise `ConfigError` if the backend cannot run on `device`, or would silently be wrong in `dtype`."""

    def keeping(self) -> LoraBackend:
        """Return a backend for the generation steps of one stream. It may keep copies of adapters until `forget`, so
        their tensors must not change before."""
        return self

    def forget(self, adapter: Mapping[str, LoraPair]) -> None:  # noqa: B027 - most keep nothing
        """The adapter's memory will be reused: drop all copies of it."""

    @abstractmethod
    def prepare(self, segments: Segments, adapters: Adapters, groups: Sequence[SiteGroup]) -> PreparedLora:
        """Prepare the terms of one step; `segments.adapters` indexes `adapters`.

        `groups`: all groups that will be passed later, as the same objects. The adapters' tensors share one dtype and
        device, and must stay in place until the step has ended. Raises `ConfigError`: see `refuse_unusable`.
        """


class TritonBackend(LoraBackend):
    """A backend whose kernels need a GPU, or Triton's interpreter in tests."""

    def refuse_unusable(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type == "cuda":
            return
        if not interpreted():
            raise ConfigError(
                f"the LoRA backend {self.name} needs a CUDA device, got {device.type}", field="lora_backend"
            )
        if dtype not in (torch.float32, torch.float16):
            expected, got = "float32 or float16 under Triton's interpreter", str(dtype).removeprefix("torch.")
            raise ConfigError(f"the LoRA backend {self.name} expected {expected}, got {got}")

    def refuse_adapters(self, adapters: Adapters) -> None:
        """Call `refuse_unusable` with the device and dtype of a step's adapters."""
        pair = next((pair for adapter in adapters for pair in adapter.values()), None)
        if pair is not None:
            self.refuse_unusable(pair.a_RD.device, pair.a_RD.dtype)


class SitewiseLora(PreparedLora):
    """Base class for terms that are computed site by site."""

    def __init__(self, segments: Segments, adapters: Adapters) -> None:
        self.segments, self._adapters = segments, adapters

    def changes(self, group: SiteGroup) -> bool:
        return any(name in adapter for adapter in self._adapters for name in group.names)

    def add(self, group: SiteGroup, ys: Sequence[Tensor], x_TD: Tensor) -> list[Tensor]:
        expected = self.segments.tokens
        assert x_TD.shape[0] == expected, f"{group.names} saw {x_TD.shape[0]} rows, expected the step's {expected}"
        return [self.add_site(name, y, x_TD) for name, y in zip(group.names, ys, strict=True)]

    def add_query_terms(self, group: SiteGroup, y_HTL: Tensor, q_HTN: Tensor, sizes: HeadSizes) -> None:
        add_query_terms(y_HTL, q_HTN, sizes, self.segments, self.pairs(group.names[0]))

    def add_output_terms(self, group: SiteGroup, y_HTE: Tensor, x_HTL: Tensor, sizes: HeadSizes) -> None:
        add_output_terms(y_HTE, x_HTL, sizes, self.segments, self.pairs(group.names[0]))

    @abstractmethod
    def add_site(self, site: str, y_TO: Tensor, x_TD: Tensor) -> Tensor:
        """Add the terms at one site; see `add`."""

    def pairs(self, site: str) -> list[LoraPair | None]:
        """Return each adapter's pair at the site; None if the adapter does not target it."""
        return [adapter.get(site) for adapter in self._adapters]
