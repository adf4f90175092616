"""The second seam: every linear site of the base adds the LoRA terms of the batch it is run with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import MethodType
from typing import cast

import torch
from torch import Tensor, nn

from coserve.kernels.lora.backend import Way, linear_group, lora_add, prepare
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, StackedWeights
from coserve.types import LoraSettings


@dataclass(frozen=True)
class LoraWeights:
    """One adapter: its pair at each site that it changes, by the site's name, in the compute dtype."""

    settings: LoraSettings
    sites: dict[str, LoraPair]


@dataclass(frozen=True)
class DropoutSpec:
    """LoRA dropout of one training forward: each input element of a pair is dropped with probability `p`.

    The mask of a site is a function of (`seed`, site, shape) alone, so that a recomputed forward, and a resumed job,
    drop the same elements. `seed` must change with every micro-batch.
    """

    p: float
    seed: int

    def apply(self, x_TD: Tensor, site: str) -> Tensor:
        """`x_TD` with dropped elements zero and the others divided by `1 - p`."""
        digest = hashlib.blake2b(f"{self.seed}/{site}".encode(), digest_size=8).digest()
        generator = torch.Generator(x_TD.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        kept_TD = torch.empty_like(x_TD, requires_grad=False).bernoulli_(1 - self.p, generator=generator)
        return x_TD * kept_TD.div_(1 - self.p)


@dataclass(frozen=True)
class LoraBatch:
    """The adapters of one packed batch: `segments.adapters` indexes `adapters`."""

    segments: Segments
    adapters: tuple[LoraWeights, ...]
    way: Way
    dropout: DropoutSpec | None = None

    @cached_property
    def trains_together(self) -> bool:
        """Whether sites that share an input learn as one. With dropout each has an input of its own."""
        pairs = (pair for adapter in self.adapters for pair in adapter.sites.values())
        dropped = self.dropout is not None and self.dropout.p > 0
        return self.way is Way.SEGMENTED and not dropped and any(pair.a_RD.requires_grad for pair in pairs)

    @cached_property
    def sums_gradients(self) -> bool:
        """Whether the kernels add gradients to the pairs' `MainGrads`, so that autograd gives none."""
        pairs = (pair for adapter in self.adapters for pair in adapter.sites.values())
        return self.way is Way.SEGMENTED and all(pair.main_grads is not None for pair in pairs)

    def pairs(self, names: Sequence[str]) -> list[tuple[LoraPair | None, ...]]:
        """Each adapter's pair at each of the sites."""
        sites = [adapter.sites for adapter in self.adapters]
        return [tuple([own.get(name) for own in sites]) for name in names]

    def prepare(self, groups: Callable[[], Sequence[Sequence[str]]]) -> None:
        """Does for all groups of sites at once what need not be done at each; once a step, however often it is asked for."""

        def pairs() -> list[list[tuple[LoraPair | None, ...]]]:
            found = [[own for own in self.pairs(names) if any(pair is not None for pair in own)] for names in groups()]
            return [group for group in found if group]

        self.segments.plan(("prepared", *map(id, self.adapters)), lambda: prepare(self.segments, pairs, self.way))

    def padded(self, rows: int) -> LoraBatch:
        """The same batch with tokens of no adapter behind it, `rows` tokens in all."""
        bounds, adapters = self.segments.bounds, self.segments.adapters
        return self if bounds[-1] == rows else replace(self, segments=Segments((*bounds, rows), (*adapters, -1)))


class SharedInput:
    """Sites that read one input, their weights stacked: the first that is called computes the outputs of all."""

    def __init__(self, index: int, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...]) -> None:
        """`index` among the layer's groups; `weight`: (ΣO, D); `sizes`: each site's O."""
        self.index, self.weight, self.bias, self.sizes = index, weight, bias, sizes
        self.names: tuple[str, ...] = ()
        """Of the sites, once they are known."""
        self.waiting: tuple[Tensor, tuple[Tensor, ...]] | None = None
        """The input, and the outputs that are still to be asked for."""

    def output(self, place: int, x: Tensor) -> Tensor:
        """What the site at `place` gives for `x`."""
        if place == 0:
            y = torch.ops.coserve.linear(x, self.weight, self.bias, self.sizes, self.index)
            if len(self.sizes) == 1:
                return cast(Tensor, y)
            self.waiting = (x, y.split(self.sizes, -1))
        return self._kept(place, x)

    def learned(self, place: int, x: Tensor, batch: LoraBatch) -> Tensor:
        """What the site at `place` gives for `x`, LoRA terms of `batch` included; differentiable."""
        if place == 0:
            stacked = StackedWeights(self.weight, self.bias, self.sizes)
            parts = linear_group(x.reshape(-1, x.shape[-1]), stacked, batch.segments, batch.pairs(self.names))
            self.waiting = (x, tuple(part.view(*x.shape[:-1], -1) for part in parts))
        return self._kept(place, x)

    def _kept(self, place: int, x: Tensor) -> Tensor:
        assert self.waiting is not None, "expected the sites of one input in the order in which they were seen"
        known, parts = self.waiting
        assert known is x, "expected the sites of one input to be called with that input"
        if place == len(self.sizes) - 1:
            self.waiting = None
        return parts[place]


class LoraSites:
    """The wrappers at a base's sites and the batch that they serve; the base owns exactly one of these."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        """Wraps each module in place: its class, parameters and path stay as they are, only `forward` is ours."""
        self.batch: LoraBatch | None = None
        self.together = False
        """Sites that share an input run as one op: see `model.fused`."""
        self._sites: dict[str, _Site] = {}
        for name, module in modules.items():
            before = getattr(module, SITE, None)
            inner = before.inner if isinstance(before, _Site) else module.forward
            self._sites[name] = _Site(name, inner, self)
            setattr(module, SITE, self._sites[name])
            # One function for all: a compiled layer is bound to its modules' functions, not to their sites.
            module.forward = MethodType(_forward, module)

    def share(self, names: Sequence[str], shared: SharedInput) -> None:
        """From now on the sites `names`, in this order, run together inside `fused`."""
        shared.names = tuple(names)
        for place, name in enumerate(names):
            self._sites[name].place, self._sites[name].shared = place, shared

    def groups(self) -> list[SharedInput]:
        """What `share` was told, each once."""
        return list(dict.fromkeys(site.shared for site in self._sites.values() if site.shared is not None))

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Sites called inside run together with those that share their input."""
        self.together = True
        try:
            yield
        finally:
            self.together = False

    def _groups(self, batch: LoraBatch) -> list[Sequence[str]]:
        """The sites that the batch runs together."""
        shared = self.groups() if batch.trains_together else []
        alone = [name for name, site in self._sites.items() if site.shared is None or not shared]
        return [*(group.names for group in shared), *((name,) for name in alone)]

    @contextmanager
    def serve(self, batch: LoraBatch | None) -> Iterator[None]:
        """Every wrapped module called inside adds `batch`'s terms; the batch from before is back afterwards."""
        if batch is not None:
            batch.prepare(lambda: self._groups(batch))
        before, self.batch = self.batch, batch
        try:
            yield
        finally:
            self.batch = before


SITE = "coserve_site"
"""Attribute of a wrapped module: its `_Site`."""


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    """A wrapped module's `forward`."""
    site = cast(_Site, module.coserve_site)
    if site.shared is not None:
        if site.sites.together:
            return site.shared.output(site.place, x)
        batch = site.sites.batch
        if batch is not None and batch.trains_together:
            return site.shared.learned(site.place, x, batch)
    return site(x)


class _Site:
    """What a wrapped module does on its own. Without a batch it is the module's own call, bit for bit."""

    def __init__(self, name: str, inner: Callable[[Tensor], Tensor], sites: LoraSites) -> None:
        self.name = name
        self.inner = inner
        self.sites = sites
        self.shared: SharedInput | None = None
        self.place = 0

    def __call__(self, x: Tensor) -> Tensor:
        """`x` (..., D) with T rows in all -> (..., O)."""
        y = self.inner(x)
        batch = self.sites.batch
        if batch is None:
            return y
        pairs = [adapter.sites.get(self.name) for adapter in batch.adapters]
        if all(pair is None for pair in pairs):
            return y
        x_TD = x.reshape(-1, x.shape[-1])
        assert x_TD.shape[0] == batch.segments.tokens, f"{self.name} saw {x_TD.shape[0]} rows, not the batch's"
        if batch.dropout is not None and batch.dropout.p > 0:
            x_TD = batch.dropout.apply(x_TD, self.name)
        y_TO = lora_add(y.reshape(-1, y.shape[-1]), x_TD, batch.segments, pairs, batch.way)
        return y_TO.reshape(y.shape)
