"""GPTQ weights (Frantar et al. 2022, https://arxiv.org/abs/2210.17323, in the files of AutoGPTQ and GPTQModel)."""

from __future__ import annotations

import torch
from torch import Tensor

from coserve.core.errors import UnsupportedBase
from coserve.model.formats.interface import Format, Parts, Settings, unpack

BITS = (2, 4, 8)


def gptq(settings: Settings) -> Format:
    """`W[o, i] = (q[i, o] - z[g[i], o]) * s[g[i], o]`; `qweight` (I * bits / 32, O) packs inputs, `qzeros` (groups, O *
    bits / 32) outputs, `g_idx` (I) is each input's group (`desc_act` reorders them).

    Version 1 stores z - 1. Raises `UnsupportedBase` for kernel-specific packings, and for 3 bits.
    """
    bits, layout = settings.get("bits"), str(settings.get("checkpoint_format") or "gptq")
    if bits not in BITS or layout not in ("gptq", "gptq_v2"):
        raise UnsupportedBase(f"gptq: expected 2, 4 or 8 bits in gptq or gptq_v2, got {bits} in {layout}")
    assert isinstance(bits, int)
    # Added to whole words: in version 1 a zero point of 0 was stored as -1, which borrowed from the next field.
    ones = 0 if layout == "gptq_v2" else sum(1 << shift for shift in range(0, 32, bits))

    def dequantize(parts: Parts) -> Tensor:
        numbers = unpack(parts[".qweight"].T, bits).float()
        zeros, scales = unpack(parts[".qzeros"] + ones, bits).float(), parts[".scales"].float()
        group = parts.get(".g_idx")
        if group is None:
            inputs = torch.arange(numbers.shape[1], device=numbers.device)
            group = inputs // (numbers.shape[1] // len(scales))
        group = group.long()
        return (numbers - zeros[group].T) * scales[group].T

    return Format("gptq", ".qweight", (".qzeros", ".scales", ".g_idx"), dequantize)
