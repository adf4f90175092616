"""Loads one tensor-parallel rank's shard of a base: made empty, then filled with slices of the files, or drawn at
random."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from coserve.data.pretrained.source import fetch_files
from coserve.model.fingerprint import fingerprint_of
from coserve.model.parallel.build import Weights, empty_model, fill_shard
from coserve.model.parallel.checkpoint import Checkpoint
from coserve.model.parallel.drawn import DrawnWeights
from coserve.model.parallel.lora import Strategy
from coserve.model.parallel.mesh import Mesh
from coserve.model.parallel.sharding import Sharding
from coserve.model.probe import refuse_statically


class Shard(NamedTuple):
    model: PreTrainedModel
    sharding: Sharding
    fingerprint: str
    """Fingerprint of the whole base."""


class LoadedShard(NamedTuple):
    model: PreTrainedModel
    sharding: Sharding
    fingerprint: str
    """Fingerprint of the whole base, on rank 0; empty on the others."""

    def share_fingerprint(self, device: torch.device) -> Shard:
        """Broadcast rank 0's fingerprint. All ranks call this at the same time."""
        digest = torch.zeros(32, dtype=torch.uint8)
        if self.fingerprint:
            digest = torch.frombuffer(bytearray.fromhex(self.fingerprint), dtype=torch.uint8)
        shared = self.sharding.mesh.broadcast(digest.to(device)).cpu().numpy().tobytes()
        return Shard(self.model, self.sharding, shared.hex())


def load_shard(
    path: str,
    config: PretrainedConfig,
    mesh: Mesh,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None,
    strategy: Strategy,
    trust_remote_code: bool,
) -> LoadedShard:
    """Load this rank's shard of the base at `path`, a folder or a hub name, without collectives.

    `seed`: draw the weights from it; None: read them from the files. `strategy`: for dense adapters. Raises
    `UnsupportedBase` as `refuse_statically`, `fill_shard` and `Checkpoint`.
    """
    model = empty_model(config, dtype, trust_remote_code=trust_remote_code)
    refuse_statically(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    with ExitStack() as stack:
        weights: Weights
        if seed is None:
            folder = Path(path) if Path(path).is_dir() else fetch_files(path, _FILES)
            weights = stack.enter_context(Checkpoint(folder, model.base_model_prefix))
            if (folder / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(folder)
        else:
            weights = DrawnWeights(empty_model(config, dtype, trust_remote_code=trust_remote_code), device, seed)
        sharding = fill_shard(model, weights, mesh, device, strategy)
        whole = ""
        if mesh.rank == 0:
            whole = fingerprint_of(model.config, shapes, lambda name: weights.get(name, shapes[name])[:], dtype)
    return LoadedShard(model, sharding, whole)


_FILES = ("*.safetensors", "*.json")
