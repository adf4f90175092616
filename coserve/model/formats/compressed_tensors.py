"""Weights of compressed-tensors, the format of llm-compressor: 8-bit floats and integers, and integers packed in words.

Quantised activations are not imitated: a dense weight serves activations as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from coserve.core.errors import UnsupportedBase
from coserve.model.formats.interface import Format, Parts, Settings, scaled, unpack

UNUSED = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
EIGHT_BITS = ("float-quantized", "int-quantized", "naive-quantized")
PACKED = "pack-quantized"
PACKED_BITS = (2, 4, 8)


def compressed_tensors(settings: Settings) -> Format:
    """`W = (q - zero) * scale`, a scale for each tensor, row, group of a row, or block.

    Raises `UnsupportedBase` for sparse weights, transforms (rotations), and layouts that are not read.
    """
    name = "compressed-tensors"
    sparse = settings.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise UnsupportedBase(f"{name}: sparse weights ({sparse['format']}) are not supported")
    if settings.get("transform_config"):
        raise UnsupportedBase(f"{name}: transforms of activations (transform_config) are not supported")
    groups = settings.get("config_groups")
    schemes = [one for one in groups.values() if isinstance(one, Mapping)] if isinstance(groups, Mapping) else []
    layouts = {str(scheme.get("format") or settings.get("format")) for scheme in schemes} or {"none"}
    weights = [one for scheme in schemes if isinstance(one := scheme.get("weights"), Mapping)]
    bits, blocks = ({repr(one.get(key)) for one in weights} for key in ("num_bits", "block_structure"))
    if len(layouts) > 1 or len(bits) != 1 or len(blocks) != 1:
        raise UnsupportedBase(f"{name}: expected one format for all weights, got {', '.join(sorted(layouts | bits))}")
    (layout,) = layouts
    if layout == PACKED and weights[0]["num_bits"] in PACKED_BITS:
        return _packed(name, int(weights[0]["num_bits"]))
    if layout in EIGHT_BITS and weights[0]["num_bits"] == 8:
        size = weights[0].get("block_structure")
        return _eight_bits(name, None if size is None else cast(tuple[int, int], tuple(size)))
    raise UnsupportedBase(f"{name}: {layout} with {weights[0]['num_bits']} bits is not supported")


def _eight_bits(name: str, block: tuple[int, int] | None) -> Format:
    def dequantize(parts: Parts) -> Tensor:
        weight = parts[".weight"]
        if weight.itemsize != 1:  # calibrated, but not compressed
            raise ValueError(f"expected 8-bit numbers, got {weight.dtype}")
        return scaled(weight, parts[".weight_scale"], block, parts.get(".weight_zero_point"))

    return Format(name, ".weight", (".weight_scale", ".weight_zero_point"), dequantize, unused=UNUSED)


def _packed(name: str, bits: int) -> Format:
    offset = 1 << (bits - 1)  # signed numbers are stored from 0

    def dequantize(parts: Parts) -> Tensor:
        rows, columns = parts[".weight_shape"].tolist()
        numbers = unpack(parts[".weight_packed"], bits)[..., :columns] - offset
        scale, zero, group = (parts.get(f".weight_{part}") for part in ("scale", "zero_point", "g_idx"))
        scale = parts[".weight_scale"] if scale is None else scale
        if zero is not None:  # packed along the rows
            zero = unpack(zero.T, bits).T[:rows] - offset
        if group is None:
            return scaled(numbers, scale, zero=zero)
        chosen = group.long()
        return (numbers.float() - (0 if zero is None else zero.float()[:, chosen])) * scale.float()[:, chosen]

    others = tuple(f".weight_{part}" for part in ("scale", "zero_point", "shape", "g_idx"))
    return Format(name, ".weight_packed", others, dequantize, unused=UNUSED)
