"""The second seam: every linear site of the base adds the LoRA terms of the batch it is run with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from coserve.kernels.dispatch import Way, lora_add
from coserve.kernels.segments import LoraPair, Segments
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

    def padded(self, rows: int) -> LoraBatch:
        """The same batch with tokens of no adapter behind it, `rows` tokens in all."""
        bounds, adapters = self.segments.bounds, self.segments.adapters
        return self if bounds[-1] == rows else replace(self, segments=Segments((*bounds, rows), (*adapters, -1)))


class LoraSites:
    """The wrappers at a base's sites and the batch that they serve; the base owns exactly one of these."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        """Wraps each module in place: its class, parameters and path stay as they are, only `forward` is ours."""
        self.batch: LoraBatch | None = None
        for name, module in modules.items():
            forward = module.forward
            inner = forward.inner if isinstance(forward, _Site) else forward
            module.forward = _Site(name, inner, self)

    @contextmanager
    def serve(self, batch: LoraBatch | None) -> Iterator[None]:
        """Every wrapped module called inside adds `batch`'s terms; the batch from before is back afterwards."""
        before, self.batch = self.batch, batch
        try:
            yield
        finally:
            self.batch = before


class _Site:
    """A wrapped module's `forward`. Without a batch it is the module's own call, bit for bit."""

    def __init__(self, name: str, inner: Callable[[Tensor], Tensor], sites: LoraSites) -> None:
        self.name = name
        self.inner = inner
        self.sites = sites

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
