"""A cartridge's tensor as pairs of keys and values, and back. Letters: P tokens, L layers, W numbers of a token's keys
(all heads) in a layer, and as many of its values."""

from __future__ import annotations

import torch
from torch import Tensor

from coserve.core.errors import CorruptAdapter
from coserve.core.types import BaseSpec, LoraSettings
from coserve.kernels.lora.types import LoraPair
from coserve.lora.files.cartridge import read_cartridge
from coserve.lora.files.peft import check_base
from coserve.lora.files.tensorfile import TensorFile
from coserve.model.lora import LoraWeights

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_prefixes(config: dict[str, object], file: TensorFile, base: BaseSpec, dtype: torch.dtype) -> LoraWeights:
    """Read the cartridge of an open file: on the CPU, in `dtype`. Raises `BaseMismatch`, `CorruptAdapter`,
    `ShapeMismatch`, `StorageError`."""
    check_base(file, base)
    settings, entry = read_cartridge(config, file, base)
    found = torch.frombuffer(file.read(entry), dtype=_DTYPES[entry.dtype]).reshape(entry.shape).to(dtype)
    if not bool(torch.isfinite(found).all()):
        raise CorruptAdapter(f"the cartridge is not finite in {str(dtype).removeprefix('torch.')}")
    return cartridge(settings, base, found)


def cartridge(settings: LoraSettings, base: BaseSpec, embeddings_PN: Tensor) -> LoraWeights:
    """Return the pairs of a tensor (P, 2 L W)."""
    parts = embeddings_PN.chunk(2 * base.layers, 1)
    return LoraWeights(
        settings,
        {
            name: LoraPair(keys_PW.contiguous(), values_PW.T.contiguous(), 1.0)
            for name, keys_PW, values_PW in zip(base.prefixes, parts[::2], parts[1::2], strict=True)
        },
    )


def embeddings(weights: LoraWeights) -> Tensor:
    """Return the tensor of a cartridge's pairs: fp32 on the CPU, (P, 2 L W)."""
    parts = [part for pair in weights.prefix for part in (pair.a_RD, pair.b_OR.T)]
    return torch.cat([part.detach().float().cpu() for part in parts], 1)
