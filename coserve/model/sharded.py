"""Loads one tensor-parallel rank's shard of a base: made empty, then filled with slices of the files, or drawn at
random."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from coserve.kernels.quantized.fp8 import refuse_unusable
from coserve.model.experts.sites import hook_shards
from coserve.model.fingerprint import fingerprint_of
from coserve.model.formats.dense import Tensors
from coserve.model.parallel.build import Weights, empty_model, fill_shard
from coserve.model.parallel.checkpoint import Checkpoint
from coserve.model.parallel.drawn import DrawnWeights
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.sharding import Sharding
from coserve.model.probe.observe import refuse_statically
from coserve.model.quantized.modules import quantize_layers


class Shard(NamedTuple):
    model: PreTrainedModel
    sharding: Sharding
    fingerprint: str
    """Fingerprint of the whole base; before `share_fingerprint` on rank 0 only, and empty on the others."""

    def share_fingerprint(self, device: torch.device) -> Shard:
        """Broadcast rank 0's fingerprint. All ranks call this at the same time."""
        digest = torch.zeros(32, dtype=torch.uint8)
        if self.fingerprint:
            digest = torch.frombuffer(bytearray.fromhex(self.fingerprint), dtype=torch.uint8)
        shared = self.sharding.mesh.broadcast(digest.to(device)).cpu().numpy().tobytes()
        return self._replace(fingerprint=shared.hex())


def load_shard(
    tensors: Tensors | None,
    config: PretrainedConfig,
    mesh: Mesh,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    seed: int,
    strategy: Strategy,
    by_expert: bool,
    trust_remote_code: bool,
) -> Shard:
    """Load this rank's shard of the base with these weights, without collectives.

    `tensors`: the weights in the base's files; None: draw them from `seed`. `name`: the base's. `quantization`: as the
    setting. `strategy`: for dense adapters. `by_expert`: see `fill_shard`. Raises `UnsupportedBase` as
    `refuse_statically`, `fill_shard`, `quantize_layers` and `Checkpoint`, and `ConfigError` for a GPU without FP8.
    """
    if quantization == "fp8":
        refuse_unusable(device, "quantization")
    model = empty_model(config, dtype, trust_remote_code=trust_remote_code)
    refuse_statically(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    weights: Weights
    if tensors is not None:
        weights = Checkpoint(tensors, model, name)
    else:
        weights = DrawnWeights(empty_model(config, dtype, trust_remote_code=trust_remote_code), device, seed)
    if quantization != "none":
        quantize_layers(model, quantization)
    sharding = fill_shard(model, weights, mesh, device, strategy, by_expert=by_expert)
    hook_shards(model)
    whole = ""
    if mesh.rank == 0:
        whole = fingerprint_of(model.config, shapes, lambda name: weights.get(name, shapes[name])[:], dtype)
    return Shard(model, sharding, whole)
