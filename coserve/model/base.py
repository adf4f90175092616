"""The base: an unmodified transformers causal LM, hooked only at its attention and its linear sites."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coserve.core.types import BaseSpec, SiteSpec
from coserve.kernels.attention.interface import Attention, KvShape
from coserve.kernels.attention.padded import PaddedAttention
from coserve.kernels.lora.dora import squared_norms, squared_rows
from coserve.kernels.lora.types import LoraPair
from coserve.kernels.recurrent.interface import StateShape
from coserve.kernels.recurrent.wrappers import recurrence_of
from coserve.model import seam
from coserve.model.adapters.dora_scales import add_squares, complete_scales, rank_scale
from coserve.model.adapters.end_sites import EndSites
from coserve.model.context import Context, context_of, fix_frequencies
from coserve.model.experts.sites import expert_sites
from coserve.model.fingerprint import fingerprint
from coserve.model.formats.source import eos_of
from coserve.model.forward_context import ForwardContext, running
from coserve.model.latent.absorbed import cache_latents, heads_note, restore
from coserve.model.lora import LoraBatch, LoraSites, LoraWeights, default_targets, prefix_sites, site_shape, site_weight
from coserve.model.packed import CHECKED_ROWS, choose_rows, pack_weights
from coserve.model.parallel.adapter import AdapterPartition
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.modules import shard_of
from coserve.model.parallel.sharding import Sharding
from coserve.model.probe.compare import Reversed, check_forward
from coserve.model.probe.forward import SEQUENCES, Forward, check_tokens, eager_forward
from coserve.model.probe.observe import Observed, decoder_layers, observe, refuse_statically
from coserve.model.quantized.modules import TEXTS, quantization_of
from coserve.model.recurrent.seam import hook, recurring
from coserve.model.seam import ReferenceAttention
from coserve.model.sharded import Shard
from coserve.model.wrappers import without_images

__all__ = ["Attention", "Base", "wrap_base"]

CPU_ROWS = 16
"""Multiple to which packed rows are padded on CPU: below 8 rows, a row's bits depend on the batch's size, unless
weights are packed (`model.packed`)."""


@dataclass
class Base:
    """One frozen base on one device. Not for concurrent use by two threads."""

    model: PreTrainedModel
    spec: BaseSpec
    device: torch.device
    dtype: torch.dtype
    layers: list[nn.Module]
    kv_shapes: list[KvShape]
    """Sizes of each layer's keys and values; zeros: the layer has no attention, or reads another's (`source`)."""
    sites: LoraSites
    tuned: bool = False
    """Whether attention needs the tokens' positions (`seam.take_over_tuning`)."""
    states: Mapping[int, StateShape] = field(default_factory=dict)
    """Sizes of each recurrent layer's state. If there are any, a forward's `attention` comes with a `Recurrence`."""
    sharding: Sharding | None = None
    """How the base is sharded, if this is one tensor-parallel rank's shard. `spec` describes the whole base."""
    packed_rows: tuple[int, ...] = ()
    """Numbers of rows to which inference pads small batches, if weights are packed (`model.packed`); else empty."""
    ends: EndSites = field(default_factory=EndSites)
    note: str = ""
    """For the operator: how the weights differ from those in the files; empty if they do not."""

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        *,
        lora: LoraBatch | None,
        keep: Tensor | None,
        gather: bool = True,
    ) -> Tensor:
        """Return the logits (len(keep) or T, V) of packed tokens.

        Token ids, positions and `keep` are int64 on the base's device. `positions_T`: each token's position in its own
        sequence; `attention` knows which tokens belong together; `lora.segments` cuts the same T tokens; `keep`: rows
        to compute logits for (None: all); `gather`: see `run`. On CPU a row's logits have the same bits whatever else
        is in the batch. Differentiable in the adapters; gradients of the base are never formed.
        """
        tokens = tokens_T.shape[0]
        assert lora is None or lora.segments.tokens == tokens, "expected segments of the same tokens"
        packed = bool(self.packed_rows) and not torch.is_grad_enabled()
        if padding := self._padding(tokens, packed):
            tokens_T = nn.functional.pad(tokens_T, (0, padding))
            positions_T = nn.functional.pad(positions_T, (0, padding))
            attention = PaddedAttention(attention, tokens)
            lora = None if lora is None else lora.padded(tokens + padding)
        kept = tokens if keep is None else keep.shape[0]
        if keep is not None and (more := self._padding(kept, packed)):
            keep = nn.functional.pad(keep, (0, more))
        with running(replace(self.prepare(lora, keep), packed=packed)):
            return self.run(tokens_T, positions_T, attention, keep, gather=gather)[:kept]

    def _padding(self, rows: int, packed: bool) -> int:
        """Return the number of rows to add on CPU, so that a row's bits do not depend on the batch."""
        if self.device.type != "cpu":
            return 0
        few = (size - rows for size in self.packed_rows if packed and rows <= size)
        return next(few, -rows % CPU_ROWS)

    def run(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attention: Attention,
        keep: Tensor | None,
        *,
        gather: bool = True,
    ) -> Tensor:
        """Call the model once in the running context, without padding: a row's bits may depend on the batch.

        `gather=False`: return the logits of this rank's shard of the vocabulary (`Sharding.vocabulary`) instead of all.
        """
        positions = {"coserve_positions": positions_T} if self.tuned else {}
        with self.recurring(attention):
            logits_KV: Tensor = self.model(
                input_ids=tokens_T[None],
                position_ids=positions_T[None],
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
                coserve_attention=attention,
                **positions,
            ).logits[0]
        return self.sharding.vocabulary.gather(logits_KV) if self.sharding is not None and gather else logits_KV

    def recurring(self, attention: Attention) -> AbstractContextManager[None]:
        """Return a context in which recurrent layers compute with the recurrence that belongs to `attention`."""
        return recurring(recurrence_of(attention)) if self.states else nullcontext()

    def prepare(self, batch: LoraBatch | None, keep: Tensor | None = None) -> ForwardContext:
        """Return the context of forwards with these adapters, for code that runs layers itself inside
        `running(context)`. `keep`: the rows that the head sees; None: all."""
        if batch is None:
            return ForwardContext()
        ends = self.ends.prepare(batch.segments, batch.adapters, keep, self.device)
        return replace(self.sites.prepare(batch), ends=ends)

    def partition(self, weights: LoraWeights, *, learns: bool = False) -> AdapterPartition | None:
        """Return how a whole adapter is partitioned among the ranks; None if the base is not sharded.

        Block-diagonal pairs use `bd` if their blocks fit the ranks. All others are made dense and use the base's
        strategy (`parallel.lora.partition_pair`), but `nfs` if a DoRA adapter `learns`: its norms need whole matrices.
        """
        if self.sharding is None:
            return None
        sharding = self.sharding
        if learns and weights.settings.use_dora:
            sharding = replace(sharding, strategy=Strategy.NFS)
        return AdapterPartition.of(sharding, weights.sites)

    def row_norms(self, sites: Mapping[str, LoraPair], squares: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the norms of the rows of `W + scaling B A` at these sites, by which DoRA divides: fp32 (O) each.

        The pairs are on the base's device. If it is sharded, they are the rank's shards of an adapter that learns, and
        all ranks call this at the same time. `squares`: a cache of `squared_rows`, filled here.
        """
        return self.norms_of(self.row_squares(sites, squares))

    def row_squares(self, sites: Mapping[str, LoraPair], squares: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return what this rank adds to the squares of `row_norms`."""
        found, known = {}, {} if squares is None else squares
        for name, pair in sites.items():
            weight = site_weight(self.model.get_submodule(name))
            known[name] = known[name] if name in known else squared_rows(weight)
            found[name] = squared_norms(weight, pair, known[name])
        return found

    def norms_of(self, squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `row_norms` from the `row_squares` of all ranks, which call this at the same time, in the same
        memory."""
        if self.sharding is not None:
            add_squares(squares, self.sharding)
        return {name: squares_O.sqrt_() for name, squares_O in squares.items()}

    def begun(self, weights: LoraWeights) -> LoraWeights:
        """Return an adapter as its training starts. What it lacks is initialised so that it changes nothing: rows of
        trained tokens from the base, DoRA's magnitudes from the row norms; on a sharded base magnitudes are NaN until
        `AdapterOptimizer.compute_scales`, as no rank has whole rows."""
        weights = self.ends.with_rows(self.ends.without_copies(weights))
        if not weights.settings.use_dora or any(pair.magnitude_O is not None for pair in weights.sites.values()):
            return weights
        sites = {}
        for name, pair in weights.sites.items():
            if self.sharding is not None:
                magnitude_O = torch.full((self.spec.site(name).out_features,), torch.nan)
            else:
                magnitude_O = self.row_norms({name: pair.to(self.device)})[name]
            sites[name] = replace(pair, magnitude_O=magnitude_O.to(pair.a_RD.device))
        return LoraWeights(weights.settings, sites)

    def served(self, weights: LoraWeights) -> LoraWeights:
        """Return `shard(weights)` in the form that forwards read: DoRA's magnitudes become scales, computed from the
        norms of the served weights, and copies of the base's own weights are dropped. Callable on any thread.

        On a sharded base, call `complete_scales` on each copy that forwards read.
        """
        with torch.no_grad(), torch.cuda.stream(self._side_stream):
            found = self.shard(self.ends.without_copies(weights))
        if not weights.settings.use_dora:
            return found
        sites = {}
        with torch.no_grad(), torch.cuda.stream(self._side_stream):  # None: no effect
            for name, pair in found.sites.items():
                whole = weights.sites[name]
                if whole.magnitude_O is None:
                    sites[name] = pair
                    continue
                weight = site_weight(self.model.get_submodule(name))
                scale_O = rank_scale(name, weight, whole.to(self.device, self.dtype), self.sharding)
                sites[name] = replace(pair, scale_O=scale_O.to(pair.a_RD.device), magnitude_O=None)
        return LoraWeights(weights.settings, sites)

    def complete_scales(self, weights: LoraWeights) -> None:
        """Complete the scales of a DoRA adapter from `served` in place, by one collective. All ranks call it at the
        same time."""
        if self.sharding is not None and weights.settings.use_dora:
            complete_scales(weights.sites, self.sharding)

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream | None:
        """Stream for work that overlaps steps; only one, as each stream keeps memory."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def shard(self, weights: LoraWeights, *, learns: bool = False) -> LoraWeights:
        """Return this rank's shard of a whole adapter, or the adapter itself if the base is not sharded. `learns`: see
        `partition`."""
        partition = self.partition(weights, learns=learns)
        return weights if partition is None else LoraWeights(weights.settings, partition.shard(weights.sites))


def wrap_base(
    model: PreTrainedModel,
    *,
    name: str,
    hub_name: str | None = None,
    eos_token_ids: Collection[int] | None = None,
    shard: Shard | None = None,
    note: str = "",
    mla_cache: str = "latents",
) -> Base:
    """Freeze a loaded causal LM, hook its attention and linear sites, and check that its logits stay the same.

    `eos_token_ids`: None: those of the model's own settings. `shard`: set if the model is one rank's shard of a base.
    `note`: see `Base`. `mla_cache`: latents or heads. On CPU, families with a mixture of experts group rows by expert,
    so their bits, but not their values, may depend on the batch.

    Raises:
        UnsupportedBase: a family that the hooks cannot serve, with the reason.
    """
    refuse_statically(model)
    model.eval().requires_grad_(False)
    hook(model)
    without_images(model)
    restore(model)
    model.config.return_dict = True
    model.config.get_text_config().output_router_logits = False  # for a loss by which the host waits for the device
    context = context_of(model.config, least=2 * max(SEQUENCES))
    fix_frequencies(model, model.device)
    expected, linears = eager_forward(model)
    seen = observe(model, context.tokens)
    for module, chunk in seen.chunks.items():
        setattr(module, seam.CHUNK, chunk)
    path, layers = decoder_layers(model, seen)
    model.set_attn_implementation(seam.NAME)
    heads_because = ""  # the setting that keeps latents out of the cache
    if mla_cache == "heads":
        heads_because = "mla_cache"
    elif shard is not None and shard.sharding.strategy is Strategy.SLORA:  # it splits an adapter's A
        heads_because = "lora_sharding slora"
    if not heads_because:
        seen.kv_shapes = cache_latents(seen.attention, seen.kv_shapes)
    modules = {
        name: module
        for name, module in linears.items()
        if name.startswith(f"{path}.") and not isinstance(module, nn.Embedding)
    }
    if shard is not None:
        expected = replace(expected, logits=shard.sharding.vocabulary.gather(expected.logits))
    identity = fingerprint(model) if shard is None else shard.fingerprint
    quantization = quantization_of(model)
    packed = model.device.type == "cpu" and shard is None and quantization == "none" and pack_weights(model)
    ends = EndSites() if shard is not None else EndSites.hook(model, len(layers), linears)
    spec = _spec(model, name, hub_name, identity, context, path, modules, eos_token_ids, seen)
    notes = note, TEXTS.get(quantization), heads_note(seen.attention, heads_because)
    base = Base(
        model=model,
        spec=msgspec.structs.replace(spec, ends=dict(ends.specs), tied=ends.tied),
        device=model.device,
        dtype=model.dtype,
        layers=layers,
        kv_shapes=seen.kv_shapes,
        sites=LoraSites(modules),
        tuned=seam.take_over_tuning(seen.attention),
        states=seen.states,
        sharding=None if shard is None else shard.sharding,
        ends=ends,
        note="; ".join(filter(None, notes)),
    )
    _check_forward(base, expected)
    if packed:
        choose_rows(base, check_tokens(model, CHECKED_ROWS))
    return base


def _check_forward(base: Base, expected: Forward) -> None:
    """Check that packed sequences give the logits that each sequence gave by itself, in any order of rows."""
    ids_T = torch.cat([check_tokens(base.model, length) for length in SEQUENCES])
    positions_T = torch.cat([torch.arange(length, device=base.device) for length in SEQUENCES])
    bounds = 0, SEQUENCES[0], sum(SEQUENCES)
    attention = ReferenceAttention(bounds)
    packed = partial(base.forward, ids_T, positions_T, attention=attention, lora=None, keep=None)
    turned = partial(base.forward, ids_T.flip(0), positions_T.flip(0), Reversed(attention), lora=None, keep=None)
    family, layers = base.spec.family, base.layers
    with torch.no_grad():
        check_forward(f"{family}, packed sequences", packed, layers, expected)
        if any(one.latent for one in base.kv_shapes):
            absorbed = partial(packed, attention=ReferenceAttention(bounds, reads_pages=True))
            check_forward(f"{family}, over a cache of latents", absorbed, layers, expected)
        check_forward(f"{family}, tokens that meet in attention only", turned, layers, expected.flip())


def _spec(
    model: PreTrainedModel,
    name: str,
    hub_name: str | None,
    identity: str,
    context: Context,
    path: str,
    modules: dict[str, nn.Module],
    eos_token_ids: Collection[int] | None,
    seen: Observed,
) -> BaseSpec:
    text = model.config.get_text_config()
    sites = {}
    for site, module in modules.items():
        layer, shard = int(site.removeprefix(f"{path}.").split(".", 1)[0]), shard_of(module)
        if shard is None:
            outputs, inputs = site_shape(module)
            sites[site] = SiteSpec(inputs, outputs, layer)
        else:
            whole = shard.partition
            sites[site] = SiteSpec(whole.inputs.size, whole.outputs.size, layer, holders=whole.outputs.holders)
    return BaseSpec(
        name=name,
        hub_name=hub_name,
        fingerprint=identity,
        family=model.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        streams=getattr(text, "altup_num_inputs", 1),
        vocab=text.vocab_size,
        context=context.tokens,
        context_note=context.note,
        eos_token_ids=tuple(sorted(eos_of(model) if eos_token_ids is None else set(eos_token_ids))),
        sites=sites,
        default_targets=default_targets(model.config.model_type, sites),
        experts=expert_sites(model, path),
        quantization=quantization_of(model),
        kv_heads=seen.kv_shapes[0].heads,
        prefixes={} if seen.states or any(map(shard_of, modules.values())) else prefix_sites(seen.kv_shapes),
    )
