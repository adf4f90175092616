"""Adapters in PEFT's file format, in and out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from coserve.adapter_store.tensor_writer import write_tensors
from coserve.adapters.bdlora import blocks_at
from coserve.adapters.gate import read_config
from coserve.adapters.peft import FINGERPRINT, PREFIX, adapter_config, read_layout
from coserve.adapters.tensorfile import TensorEntry, TensorFile, check_digest, digest_file
from coserve.errors import CorruptAdapter
from coserve.kernels.lora.types import LoraPair
from coserve.model.lora import LoraWeights
from coserve.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from coserve.types import AdapterDigests, BaseSpec

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_adapter(
    folder: Path,
    base: BaseSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    digests: AdapterDigests | None = None,
) -> LoraWeights:
    """The adapter of a PEFT folder, in `dtype` on `device`; block-diagonal matrices (BD-LoRA) stay packed.

    `digests`: what the registry knows of the files; None: they are taken as they are.

    Raises:
        AdapterError: as `peft.inspect_adapter`; `CorruptAdapter` for values that are not finite in `dtype`, and for
            files that are not those of `digests`.
        StorageError: the machine cannot read the files now.
    """
    if digests is not None and digests.config:
        check_digest(digest_file(folder, ADAPTER_CONFIG), digests.config, ADAPTER_CONFIG)
    config = read_config(folder)
    sites = {}
    with TensorFile(folder, ADAPTER_WEIGHTS) as file:
        if digests is not None:
            check_digest(file.sha256(), digests.weights, ADAPTER_WEIGHTS)
        layout = read_layout(config, file, base, None if digests is None else digests.alphas)
        for name, shape in layout.sites.items():
            a_RD, b_OR = (_tensor(file, place[name]).to(device, dtype) for place in (layout.a, layout.b))
            pair = LoraPair(a_RD, b_OR, shape.scaling, a_blocks=shape.a_blocks, b_blocks=shape.b_blocks)
            if not (_all_finite(pair.a_RD) and _all_finite(pair.b_OR)):
                raise CorruptAdapter(f"{name}: its weights are not finite in {str(dtype).removeprefix('torch.')}")
            sites[name] = pair
    return LoraWeights(layout.settings, sites)


def save_adapter(folder: Path, weights: LoraWeights, base: BaseSpec) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` (float32) into an existing folder.

    Plain writes: whoever calls makes them durable and atomic. The weights remember the base's fingerprint. Equal adapters get
    equal bytes, hence equal digests.
    """
    tensors = {}
    for site, pair in weights.sites.items():
        assert (pair.a_blocks, pair.b_blocks) == blocks_at(weights.settings, site), f"{site} is not as its settings say"
        tensors[f"{PREFIX}{site}.lora_A.weight"] = pair.a_RD.detach().float().cpu().contiguous()
        tensors[f"{PREFIX}{site}.lora_B.weight"] = pair.b_OR.detach().float().cpu().contiguous()
    write_tensors(folder / ADAPTER_WEIGHTS, tensors, {"format": "pt", FINGERPRINT: base.fingerprint})
    config = adapter_config(weights.settings, base, weights.sites)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _all_finite(weights: Tensor) -> bool:
    """Whether all are: their extremes are, as NaN and infinity prevail. Ten times as fast as `torch.isfinite`, which makes new tensors."""
    return weights.numel() == 0 or bool(torch.stack(torch.aminmax(weights)).isfinite().all())


def _tensor(file: TensorFile, entry: TensorEntry) -> Tensor:
    return torch.frombuffer(file.read(entry), dtype=_DTYPES[entry.dtype]).reshape(entry.shape)
