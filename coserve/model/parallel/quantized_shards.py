"""A rank's shards of the modules that are quantised at load. They dequantise to the values of the whole weight's
quantisation, bit for bit, so a base has the same weights on any number of GPUs."""

from __future__ import annotations

import torch

from coserve.core.errors import UnsupportedBase
from coserve.kernels.quantized import fp8, nf4
from coserve.model.parallel.partition import Features, Lazy, MatrixPartition, SitePartition
from coserve.model.quantized.modules import QuantizedLinear


def check_shard(path: str, module: QuantizedLinear, partition: SitePartition) -> None:
    """Raise `UnsupportedBase` for shards that split a block of NF4, or whose sizes FP8's products do not allow. `path`:
    the module's, for the message."""
    inputs, outputs = partition.inputs, partition.outputs
    if module.quantization == "nf4":
        if any(bound % nf4.BLOCK for own in inputs.ranks for ends in own for bound in ends):
            raise _refusal(path, inputs, f"input features in whole blocks of {nf4.BLOCK}, as nf4 quantises them")
    elif inputs.local % fp8.MULTIPLE or outputs.local % fp8.MULTIPLE:
        kind, found = ("input", inputs) if inputs.local % fp8.MULTIPLE else ("output", outputs)
        raise _refusal(path, found, f"a multiple of {fp8.MULTIPLE} {kind} features, for products in fp8")


def _refusal(path: str, features: Features, what: str) -> UnsupportedBase:
    ranks, local, size = len(features.ranks), features.local, features.size
    return UnsupportedBase(f"{path}: expected each of {ranks} GPUs to hold {what}; got {local} of {size} features")


@torch.no_grad()
def take_shard(module: QuantizedLinear, whole: Lazy, partition: SitePartition, rank: int, device: torch.device) -> None:
    """Give the module the rank's shard of its weight (O, D), quantised on `device`.

    Reads the rank's slice alone, but whole rows for FP8, whose scales are those of whole rows.
    """
    if module.quantization == "nf4":
        part = MatrixPartition(partition.outputs, partition.inputs).shard(whole, rank)
        module.hold(*nf4.quantize(part.to(device, module.dtype)))
        return
    rows = partition.outputs.shard(whole, rank).to(device, module.dtype)
    module.hold(*fp8.quantize(partition.inputs.shard(rows, rank, 1), fp8.row_scales(rows)))
