"""Initial adapter weights: a published adapter's, or PEFT's initialisations as a function of seed and site."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coserve.core.errors import AdapterNotFound
from coserve.core.training.jobs import JobSpec
from coserve.core.types import AdapterDigests, AdapterRef, BaseSpec, LoraSettings, SiteSpec
from coserve.finetune.lora_tensors import cast
from coserve.kernels.attention.interface import AttentionParams
from coserve.kernels.attention.packed import PackedAttention
from coserve.kernels.lora.types import LoraPair
from coserve.lora.files.bdlora import blocks_at, packed_shapes
from coserve.lora.files.targets import rank_and_scaling, resolve_targets
from coserve.lora.store.files import Part, load_adapter
from coserve.model.base import Base
from coserve.model.lora import LoraWeights
from coserve.state.folder import DataFolder


def new_adapter(
    settings: LoraSettings,
    base: BaseSpec,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    part: Part | None = None,
) -> LoraWeights:
    """Return a new adapter, initialised as by PEFT; with `default` and `gaussian` its output is zero (B is zero).

    With BD-LoRA each block is initialised as a LoRA of rank r/N on its shard, as in the paper (section 3 and C.1):
    Kaiming uses the shard's fan-in. (PEFT's own BD-LoRA starts a block-diagonal A with a spread larger by the square
    root of 6.)

    Numbers are drawn in fp32 on the CPU, separately for each site, so a seed gives the same adapter on any machine and
    with any other targets. Raises `InvalidRequest` like `resolve_targets`.
    """
    sites = dict[str, LoraPair]()
    for site in resolve_targets(settings, base):
        rank, scaling = rank_and_scaling(settings, site)
        digest = hashlib.blake2b(f"{seed}/{site}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        in_a, in_b = blocks_at(settings, site)
        spec = base.site(site)
        start = [_blocks(settings.init, rank, spec, (in_a, in_b), generator) for _ in range(spec.experts)]
        if spec.layer < 0:
            start = [_of_embedding(rank, spec, generator)]
        a_RD, b_OR = (torch.cat(parts).to(device, dtype) for parts in zip(*start, strict=True))
        one = {site: LoraPair(a_RD, b_OR, scaling, a_blocks=in_a, b_blocks=in_b, experts=spec.experts)}
        sites |= one if part is None else cast(part(LoraWeights(settings, one)), dtype).sites
    return LoraWeights(settings, sites)


def zero_adapter(
    settings: LoraSettings, base: BaseSpec, *, dtype: torch.dtype, device: torch.device | str
) -> LoraWeights:
    """Return an adapter of the same shapes, all zeros, for measurements that do not depend on values. Raises like
    `new_adapter`."""
    sites = {}
    for site in resolve_targets(settings, base):
        (rank, scaling), (in_a, in_b) = rank_and_scaling(settings, site), blocks_at(settings, site)
        spec = base.site(site)
        a, b = (torch.zeros(shape, dtype=dtype, device=device) for shape in packed_shapes(spec, rank, (in_a, in_b)))
        sites[site] = LoraPair(a, b, scaling, a_blocks=in_a, b_blocks=in_b, experts=spec.experts)
    return LoraWeights(settings, sites)


def _blocks(
    init: str, rank: int, site: SiteSpec, blocks: tuple[int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Both matrices as stored: independent LoRAs, one for each shard of the site."""
    in_a, in_b = blocks
    count, shard = max(blocks), (site.in_features // in_a, site.out_features // in_b)
    parts = [_start(init, rank // count, *shard, generator) for _ in range(count)]
    a_RD = torch.cat([a for a, _ in parts])
    return a_RD, torch.cat([b for _, b in parts], dim=0 if in_b == count else 1)


def _of_embedding(rank: int, site: SiteSpec, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Both matrices of the input embedding's pair: A is zero, as only the rows of A of tokens that occur learn."""
    return torch.zeros(rank, site.in_features), torch.empty(site.out_features, rank).normal_(generator=generator)


def _start(
    init: str, rank: int, in_features: int, out_features: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    a_RD, b_OR = torch.empty(rank, in_features), torch.zeros(out_features, rank)
    if init == "gaussian":
        return a_RD.normal_(std=1 / rank, generator=generator), b_OR
    if init == "orthogonal":
        # Even rows of an orthogonal matrix go to A, odd rows to B: B A is zero although neither factor is.
        q_RR, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
        a_RD = (torch.randn(in_features, rank // 2, generator=generator) @ q_RR[0::2]).T / 10
        b_OR = (torch.randn(out_features, rank // 2, generator=generator) @ q_RR[1::2]) / 10
        return a_RD.contiguous(), b_OR
    bound = 1 / math.sqrt(in_features)  # Kaiming uniform with a = sqrt(5)
    return a_RD.uniform_(-bound, bound, generator=generator), b_OR


class Start(NamedTuple):
    """Initial weights of a job, fp32 on the CPU."""

    whole: LoraWeights
    """The whole adapter; with several ranks on the meta device."""
    part: LoraWeights
    """This rank's shards of it."""


def initial_weights(spec: JobSpec, base: Base, folder: DataFolder) -> Start:
    """The job's initial weights: a new adapter, or the continued one from its files (its copy in memory is rounded to
    the base's dtype). Zeros for a cartridge: see `first_cartridge`. With several ranks a few sites are in memory at a
    time."""
    if base.sharding is None:
        whole = base.begun(_initial(spec, base.spec, folder, None))
        return Start(whole, whole)
    like = dict[str, LoraPair]()

    def part(some: LoraWeights) -> LoraWeights:
        begun = base.begun(some)
        like.update((site, pair.to("meta")) for site, pair in begun.sites.items())
        return base.shard(begun, learns=True)

    own = _initial(spec, base.spec, folder, part)
    return Start(LoraWeights(own.settings, like), own)


def _initial(spec: JobSpec, base: BaseSpec, folder: DataFolder, part: Part | None) -> LoraWeights:
    if spec.lora.cartridge:
        weights = zero_adapter(spec.lora, base, dtype=torch.float32, device="cpu")
        return weights if part is None else part(weights)
    if spec.init_from is None:
        return new_adapter(spec.lora, base, seed=spec.training.seed, dtype=torch.float32, device="cpu", part=part)
    return published_adapter(spec.init_from, spec.init_digests, "continue_from", base, folder, part)


def published_adapter(
    ref: AdapterRef,
    digests: AdapterDigests | None,
    field: str,
    base: BaseSpec,
    folder: DataFolder,
    part: Part | None = None,
) -> LoraWeights:
    """Load a published adapter: fp32, on the CPU. `field` is the request field that errors name; `part`: see
    `load_adapter`."""
    if not (path := folder.adapter(ref)).is_dir():
        raise AdapterNotFound(f"no adapter {str(ref)!r}", field=field)
    return load_adapter(path, base, dtype=torch.float32, digests=digests, part=part)


def first_cartridge(spec: JobSpec, base: Base) -> LoraWeights:
    """Return the cartridge that training begins with, fp32 on the CPU: the base's keys and values of the document's
    first tokens (Cartridges, section 3.2). Call it between steps: it runs the base."""
    ids_T = torch.tensor(spec.prefix, device=base.device)
    seen = RecordingAttention((0, len(spec.prefix)))
    with torch.no_grad():
        base.forward(
            ids_T, torch.arange(len(spec.prefix), device=base.device), seen, lora=None, keep=ids_T.new_zeros(1)
        )
    found = {name: LoraPair(*seen.pairs[site.layer], 1.0) for name, site in base.spec.prefixes.items()}
    return LoraWeights(spec.lora, found)


class RecordingAttention(PackedAttention):
    """Attention that keeps each layer's keys (T, K D) and values (K D, T)."""

    def __init__(self, bounds: Sequence[int]) -> None:
        super().__init__(bounds)
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, params: AttentionParams) -> Tensor:
        k_TW, v_TW = (own.transpose(0, 1).flatten(1).float().cpu() for own in (k_KTD, v_KTD))
        self.pairs[layer] = k_TW.contiguous(), v_TW.T.contiguous()
        return super().attend(layer, q_HTD, k_KTD, v_KTD, params)
