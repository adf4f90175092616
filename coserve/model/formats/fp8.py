"""FP8 weights with a scale for each block or each tensor (`quant_method: fp8`: DeepSeek, Qwen), or for each row
(`fbgemm_fp8`)."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from coserve.core.errors import UnsupportedBase
from coserve.model.formats.interface import Format, Parts, Settings, scaled

UNUSED = ("activation_scale", ".input_scale", ".k_scale", ".v_scale", ".input_scale_ub")


def fp8_blocks(settings: Settings) -> Format:
    """`W[o, i] = q[o, i] * weight_scale_inv[o // rows, i // columns]` with `weight_block_size: [rows, columns]`.

    Without `weight_block_size` there is one scale for the whole weight. Stacked experts have blocks, or a scale, each.
    """
    size = settings.get("weight_block_size")
    if size is not None and not (isinstance(size, list) and len(size) == 2):
        raise UnsupportedBase(f"fp8: expected a weight_block_size of two numbers, got {size!r}")
    block = None if size is None else cast(tuple[int, int], tuple(size))

    def dequantize(parts: Parts) -> Tensor:
        return scaled(parts[""], parts["_scale_inv"], block)

    return Format("fp8", "", ("_scale_inv",), dequantize, dense="", unused=UNUSED)


def fp8_rows(settings: Settings) -> Format:
    """`W[o, i] = q[o, i] * weight_scale[o, 0]`."""

    def dequantize(parts: Parts) -> Tensor:
        return scaled(parts[".weight"], parts[".weight_scale"])

    return Format("fbgemm_fp8", ".weight", (".weight_scale",), dequantize, unused=UNUSED)
