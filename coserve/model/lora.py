"""Hooks every linear site of the base to add the LoRA terms of the running batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from types import MethodType
from typing import cast

import msgspec
import torch
from torch import Tensor, nn

from coserve.core.names import DECODER, is_end, is_prefix
from coserve.core.types import LoraSettings, SiteSpec
from coserve.kernels.attention.interface import KvShape
from coserve.kernels.lora.dora import ScaledLora, with_scales
from coserve.kernels.lora.experts.interface import RemoteExperts
from coserve.kernels.lora.experts.terms import expert_lora
from coserve.kernels.lora.interface import LoraBackend, PreparedLora
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import FrozenWeight, LoraPair, SiteGroup
from coserve.model.dropout import Dropout
from coserve.model.forward_context import ForwardContext, current
from coserve.model.parallel.fully_sharded import prepare_lora
from coserve.model.parallel.modules import SiteShard, shard_of
from coserve.model.quantized.modules import QuantizedLinear


@dataclass(frozen=True)
class LoraWeights:
    """One adapter: its pair at each site that it changes, by the site's name, in the compute dtype."""

    settings: LoraSettings
    sites: Mapping[str, LoraPair]
    remote: int = -1
    """Slot of its experts' pairs at the LoRA servers, if those hold them instead of `sites`; -1: `sites` has all."""

    @cached_property
    def linear(self) -> Mapping[str, LoraPair]:
        """The pairs at linear modules of layers."""
        others = self.experts.keys() | self.ends.keys() | {name for name in self.sites if is_prefix(name)}
        return {name: pair for name, pair in self.sites.items() if name not in others} if others else self.sites

    @cached_property
    def ends(self) -> dict[str, LoraPair]:
        """Changes of the input embedding and the head: pairs, and replaced rows (K, D) of names with `TOKEN_ROWS` or
        `WHOLE_COPY`, as the `a_RD` of a pair whose `b_OR` is empty."""
        return {name: self.sites[name] for name in self.sites if is_end(name)}

    @cached_property
    def experts(self) -> dict[str, LoraPair]:
        """The pairs of experts' parameters."""
        if self.settings.target_parameters is None:
            return {}
        return {name: pair for name, pair in self.sites.items() if pair.experts > 1}

    @property
    def prefix(self) -> Sequence[LoraPair]:
        """The KV prefix, layer by layer: keys (P, K D) as `a_RD`, values (K D, P) as `b_OR`; empty: none."""
        return tuple([self.sites[name] for name in self.sites if is_prefix(name)])

    @cached_property
    def parts(self) -> tuple[LoraWeights, ...]:
        """An encoder's adapter and its decoder's, where a job trains both; else the adapter itself."""
        if not self.settings.decoder:
            return (self,)
        both: tuple[dict[str, LoraPair], dict[str, LoraPair]] = {}, {}
        for name, pair in self.sites.items():
            both[name.endswith(DECODER)][name.removesuffix(DECODER)] = pair
        encoder = msgspec.structs.replace(self.settings, decoder=False)
        decoder = msgspec.structs.replace(encoder, trainable_token_indices=None)
        return LoraWeights(encoder, both[0]), LoraWeights(decoder, both[1])


@dataclass(frozen=True)
class LoraBatch:
    """The adapters of one packed batch: `segments.adapters` indexes `adapters`."""

    segments: Segments
    adapters: tuple[LoraWeights, ...]
    backend: LoraBackend
    dropout: Dropout | None = None
    kept: KeptLora | None = None
    """Cache of prepared terms, for training batches."""
    remote: RemoteExperts | None = None
    """The LoRA servers that hold experts' pairs of adapters; None: there are none."""

    def padded(self, rows: int) -> LoraBatch:
        """Return the same batch, padded at its end to `rows` tokens with tokens of no adapter."""
        bounds, adapters = self.segments.bounds, self.segments.adapters
        return self if bounds[-1] == rows else replace(self, segments=Segments((*bounds, rows), (*adapters, -1)))


class KeptLora:
    """Cache of prepared terms of training batches, reused by later batches of the same adapters.

    The terms hold tables of addresses, which do not change. Terms that hold copies of weights notice when an optimizer
    changes them; only the last ones are kept, in memory that the plan sets aside for training. Call `forget` when an
    adapter is gone, as the cache keeps its adapters alive.
    """

    def __init__(self, most: int = 16) -> None:
        """`most`: number of entries kept."""
        self._most = most
        self._found: dict[Hashable, tuple[tuple[LoraWeights, ...], PreparedLora]] = {}
        """Each entry holds its adapters, so that their ids are not reused."""

    def forget(self) -> None:
        self._found.clear()

    def find(self, batch: LoraBatch, grouped: bool) -> PreparedLora | None:
        """Return terms for this batch, if terms of the same adapters were put; else None."""
        found = self._found.get(self._key(batch, grouped))
        return None if found is None else found[1].for_batch(batch.segments)

    def put(self, batch: LoraBatch, grouped: bool, lora: PreparedLora) -> None:
        reusable = lora.for_batch(batch.segments)  # a fresh one, without this batch's own state
        if reusable is None:
            return
        if len(self._found) >= self._most or reusable.holds_weights:
            self._found.clear()
        self._found[self._key(batch, grouped)] = batch.adapters, reusable

    def _key(self, batch: LoraBatch, grouped: bool) -> Hashable:
        return batch.backend.name, grouped, *map(id, batch.adapters)


class SharedInput:
    """Sites that read one input, with stacked weights: the first one that is called computes the outputs of all."""

    def __init__(self, group: SiteGroup, stacked: FrozenWeight, *, sums: bool = False) -> None:
        """`sums`: the outputs are to be summed over the tensor-parallel ranks (row-parallel sites)."""
        self.group, self.index, self.sums = group, group.index, sums
        self.stacked, self.sizes = stacked, stacked.sizes
        self._pending: tuple[Tensor, tuple[Tensor, ...]] | None = None
        """The input and all outputs, from the first site's call to the last one's. Not in the running context, which
        traced code must not read."""
        self.whole: FrozenWeight | None = stacked
        """Weights of all sites that read the input, for one GEMM of fused forwards; None: in another group's
        `whole`."""
        self._others: tuple[SharedInput, ...] = ()

    def lead(self, others: Sequence[SharedInput], whole: FrozenWeight) -> None:
        """Let fused forwards compute the outputs of the layer's next groups, `others`, with this one's: they read the
        same input. `whole`: the weights of all."""
        self.whole, self._others = whole, tuple(others)
        for other in others:
            other.whole = None

    def output(self, place: int, x: Tensor) -> Tensor:
        """Return the output of the site at index `place` for `x` in a fused forward. Traced by torch.compile."""
        if place == 0 and self.whole is not None:
            y = self.whole.traced_linear(x, self.index)
            if len(self.whole.sizes) == 1:
                return y
            parts = torch.split(y, list(self.whole.sizes), -1)
            for one in (self, *self._others):
                one._pending, parts = (x, parts[: len(one.sizes)]), parts[len(one.sizes) :]
        return self._kept(place, x)

    def traced(self, place: int, x: Tensor) -> Tensor:
        """Return the output of the site at index `place` for `x`, while a training layer is traced."""
        if place == 0:
            y = torch.ops.coserve.learn(x, sum(self.sizes), self.index)
            self._pending = (x, y.split(self.sizes, -1) if len(self.sizes) > 1 else (y,))
        return self._kept(place, x)

    def learned(self, place: int, x: Tensor, lora: PreparedLora) -> Tensor:
        """Return the output of the site at index `place` for `x`, LoRA terms included; differentiable."""
        if place == 0:
            parts = lora.linear_group(self.group, x.reshape(-1, x.shape[-1]), self.stacked)
            self._pending = (x, tuple(part.view(*x.shape[:-1], -1) for part in parts))
        return self._kept(place, x)

    def _kept(self, place: int, x: Tensor) -> Tensor:
        assert self._pending is not None, "expected the sites of one input in the order in which they were seen"
        known, parts = self._pending
        assert known is x, "expected the sites of one input to be called with that input"
        if place == len(self.sizes) - 1:
            self._pending = None
        return parts[place]


def site_shape(module: nn.Module) -> tuple[int, int]:
    """Return (O, D) of a linear module, without the weight of a quantised one."""
    if isinstance(module, QuantizedLinear):
        return module.out_features, module.in_features
    outputs, inputs = site_weight(module).shape
    return outputs, inputs


def site_weight(module: nn.Module) -> Tensor:
    """Return a linear module's weight (O, D). Conv1D stores it transposed; a quantised one is dequantised."""
    assert isinstance(module.weight, Tensor)
    return module.weight if isinstance(module, nn.Linear) else module.weight.T


PEFT_REFUSES = dict.fromkeys(("falcon_h1", "nemotron_h"), ("out_proj",))
"""Names of sites that PEFT loads no adapters for, by family."""


def default_targets(family: str, sites: Iterable[str]) -> tuple[str, ...]:
    """Return the last names of the sites, without those that PEFT refuses."""
    names = dict.fromkeys(site.rsplit(".", 1)[1] for site in sites)
    return tuple(name for name in names if name not in PEFT_REFUSES.get(family, ()))


def prefix_sites(shapes: Sequence[KvShape]) -> dict[str, SiteSpec]:
    """Return `BaseSpec.prefixes`; empty if layers differ, or keys from values, and for latents."""
    if len({*shapes}) > 1 or shapes[0].keys != shapes[0].values or shapes[0].latent:
        return {}
    width = shapes[0].heads * shapes[0].keys
    return {f"layers.{layer}.prefix": SiteSpec(width, width, layer) for layer in range(len(shapes))}


class LoraSites:
    """The hooks at a base's sites; a base owns exactly one of these."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        """Hook each module in place: its class, parameters and path stay the same, only `forward` is replaced."""
        self._sites: dict[str, _Site] = {}
        self._device = site_weight(next(iter(modules.values()))).device
        self._shards: dict[str, SiteShard] = {}
        self.biases: dict[str, Tensor | None] = {n: getattr(module, "bias", None) for n, module in modules.items()}
        """Each site's bias, this rank's shard."""
        for name, module in modules.items():
            before, shard = getattr(module, SITE, None), shard_of(module)
            # A sharded module's `forward` sums over the ranks, but LoRA terms must be added before the sum.
            inner = MethodType(type(module).forward, module) if shard is not None else module.forward
            if isinstance(before, _Site):
                inner = before.inner
            self._sites[name] = _Site(SiteGroup((name,)), inner, shard)
            if shard is not None:
                self._shards[name] = shard
            setattr(module, SITE, self._sites[name])
            # One function for all modules: compiled layers guard on it, so it must not differ between sites.
            module.forward = MethodType(_forward, module)

    def share(self, shared: SharedInput) -> None:
        """From now on run the group's sites together in fused forwards, and in training if that is faster."""
        for place, name in enumerate(shared.group.names):
            self._sites[name].place, self._sites[name].shared = place, shared

    def shared(self) -> list[SharedInput]:
        """Each `SharedInput` that was given to `share`, once."""
        return list(dict.fromkeys(site.shared for site in self._sites.values() if site.shared is not None))

    def shared_by_site(self) -> dict[str, SharedInput]:
        """`shared`, by the names of their sites."""
        return {name: site.shared for name, site in self._sites.items() if site.shared is not None}

    def prepare(self, batch: LoraBatch) -> ForwardContext:
        """Return the context of forwards with this batch. Call it once a step: it serves all layers, forward and
        backward."""
        backend, dropout = batch.backend, batch.dropout
        learned = any(
            pair.a_RD.requires_grad for adapter in batch.adapters for pair in islice(adapter.sites.values(), 1)
        )
        # With dropout each site has an input of its own, so sites cannot be grouped.
        grouped = backend.groups_inputs and dropout is None and learned
        shared = self.shared() if grouped else []
        alone = [site.group for site in self._sites.values() if site.shared is None or not shared]
        groups = [*(one.group for one in shared), *alone]
        kept = batch.kept if learned else None
        lora = None if kept is None else kept.find(batch, grouped)
        if lora is None:
            adapters = [adapter.linear for adapter in batch.adapters]
            lora = prepare_lora(backend, batch.segments, adapters, groups, self._shards)
            lora = with_scales(lora, batch.segments, adapters, self.biases)
            if kept is not None:
                kept.put(batch, grouped, lora)
        lora.experts = expert_lora(batch.segments, [adapter.experts for adapter in batch.adapters], self._device)
        if batch.remote is not None:
            slots = [adapter.remote for adapter in batch.adapters]
            lora.remote = batch.remote.step(batch.segments, slots)
        return ForwardContext(lora, dropout, grouped)

    def terms(self, batch: LoraBatch, segments: Segments) -> PreparedLora:
        """Return the terms at linear modules for other rows with the batch's adapters."""
        found = self.prepare(replace(batch, segments=segments, remote=None)).lora
        assert found is not None, "expected what every batch has"
        return found


SITE = "coserve_site"
"""Attribute of a wrapped module that holds its `_Site`."""


def shared_of(module: nn.Module) -> SharedInput | None:
    """Return the `SharedInput` of a wrapped module, or None."""
    site = getattr(module, SITE, None)
    return site.shared if isinstance(site, _Site) else None


def group_of(module: nn.Module) -> SiteGroup:
    """Return the group with only this wrapped module."""
    return cast(_Site, getattr(module, SITE)).group


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    """The `forward` of every wrapped module."""
    site = cast(_Site, module.coserve_site)
    # Compiled layers run in fused forwards only. Tracing must not read the context: dynamo would guard on its contents,
    # and it sees a thread-local's defaults instead of this thread's values.
    if torch.compiler.is_dynamo_compiling() or current.context.fused is not None:
        return site.inner(x) if site.shared is None else site.shared.output(site.place, x)
    if current.context.training is not None and site.shared is not None:
        return site.shared.traced(site.place, x)
    y = site.output(x, current.context)
    return y if site.shard is None or not site.shard.partition.sums else site.shard.sum(y)


class _Site:
    """A wrapped module: its own forward, and a group with only itself."""

    def __init__(self, group: SiteGroup, inner: Callable[[Tensor], Tensor], shard: SiteShard | None) -> None:
        self.group, self.inner, self.shard = group, inner, shard
        self.shared: SharedInput | None = None
        self.place = 0
        """Index among the sites of `shared`."""

    def output(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output of `x` (..., D) with T rows in all, in a forward that is not fused, LoRA terms included:
        (..., O); for a shard, before any sum over the ranks.

        It is bitwise the module's own output if no adapter changes the site.
        """
        lora, dropout = context.lora, context.dropout
        if lora is not None and context.grouped and self.shared is not None:
            return self.shared.learned(self.place, x, lora)
        y = self.inner(x)
        if lora is None or not lora.changes(self.group):
            return y
        x_TD, y_TO = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        if dropout is not None:
            x_TD = dropout.apply(x_TD, self.group.names[0], self.shard)
            if isinstance(lora, ScaledLora) and lora.scales(self.group):
                # PEFT's DoRA scales the base's output for the dropped input, and leaves the rest as it is.
                dropped_TO = self.inner(x_TD)
                rest_TO = y_TO - dropped_TO
                return (rest_TO + lora.add(self.group, [dropped_TO], x_TD)[0]).reshape(y.shape)
        (y_TO,) = lora.add(self.group, [y_TO], x_TD)
        return y_TO.reshape(y.shape)
