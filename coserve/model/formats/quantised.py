"""Weights that tools for quantisation wrote, by their `quant_method`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from coserve.core.errors import UnsupportedBase
from coserve.model.formats.interface import Format, Parts, Settings, scaled, unpack

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of the eight numbers of a word, in units of 4 bits."""
WORD_BITS = (2, 4, 8)
"""Sizes of the numbers that GPTQ and compressed-tensors pack in words."""
FP8_UNUSED = ("activation_scale", ".input_scale", ".k_scale", ".v_scale", ".input_scale_ub")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number that each 4-bit code of MXFP4 stands for."""
MXFP4_BIAS = 127
COMPRESSED_UNUSED = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
EIGHT_BITS = ("float-quantized", "int-quantized", "naive-quantized")
PACKED = "pack-quantized"


def awq(settings: Settings) -> Format:
    """AWQ in the `gemm` packing (Lin et al. 2023, https://arxiv.org/abs/2306.00978, and its AutoAWQ files).

    `W[o, i] = (q[i, o] - z[i // group, o]) * s[i // group, o]`; `qweight` (I, O / 8), `qzeros` and `scales` with a
    row for each group of inputs. Raises `UnsupportedBase` for other packings.
    """
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise UnsupportedBase(f"awq: expected version 'gemm' with 4 bits, got {version!r} with {bits}")
    return Format("awq", ".qweight", (".qzeros", ".scales"), _of_awq)


def _of_awq(parts: Parts) -> Tensor:
    words = (unpack(parts[part][..., None], 4) for part in (".qweight", ".qzeros"))
    numbers, zeros = (one[..., list(AWQ_ORDER)].flatten(-2) for one in words)
    return scaled(numbers, parts[".scales"], zero=zeros).mT


def gptq(settings: Settings) -> Format:
    """GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323, in the files of AutoGPTQ and GPTQModel).

    `W[o, i] = (q[i, o] - z[g[i], o]) * s[g[i], o]`; `qweight` (I * bits / 32, O) packs inputs, `qzeros` (groups, O *
    bits / 32) outputs, `g_idx` (I) is each input's group (`desc_act` reorders them).

    Version 1 stores z - 1. Raises `UnsupportedBase` for kernel-specific packings, and for 3 bits.
    """
    bits, layout = settings.get("bits"), str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    if bits not in WORD_BITS or layout not in ("gptq", "gptq_v2"):
        raise UnsupportedBase(f"gptq: expected 2, 4 or 8 bits in gptq or gptq_v2, got {bits} in {layout}")
    assert isinstance(bits, int)
    size = int(str(settings.get("group_size") or -1))
    # Added to whole words: in version 1 a zero point of 0 was stored as -1, which borrowed from the next field.
    ones = 0 if layout == "gptq_v2" else sum(1 << shift for shift in range(0, 32, bits))

    def dequantize(parts: Parts) -> Tensor:
        numbers = unpack(parts[".qweight"].T, bits).float()
        zeros, scales = unpack(parts[".qzeros"] + ones, bits).float(), parts[".scales"].float()
        group = parts.get(".g_idx")
        if group is None:
            inputs = torch.arange(numbers.shape[1], device=numbers.device)
            group = inputs // (size if size > 0 else numbers.shape[1] // len(scales))
        group = group.long()
        return (numbers - zeros[group].T) * scales[group].T

    return Format("gptq", ".qweight", (".qzeros", ".scales", ".g_idx"), dequantize)


def fp8_blocks(settings: Settings) -> Format:
    """`quant_method: fp8`, as in DeepSeek and Qwen.

    `W[o, i] = q[o, i] * weight_scale_inv[o // rows, i // columns]` with `weight_block_size: [rows, columns]`.

    Without `weight_block_size` there is one scale for the whole weight. Stacked experts have blocks, or a scale, each.
    AutoFP8's files say `weight_scale`.
    """
    size = settings.get("weight_block_size")
    if size is not None and not (isinstance(size, list) and len(size) == 2):
        raise UnsupportedBase(f"fp8: expected a weight_block_size of two numbers, got {size!r}")
    block = None if size is None else cast(tuple[int, int], tuple(size))

    def dequantize(parts: Parts) -> Tensor:
        return scaled(parts[""], parts["_scale" if "_scale" in parts else "_scale_inv"], block)

    return Format("fp8", "", ("_scale_inv", "_scale"), dequantize, dense="", unused=FP8_UNUSED)


def fp8_rows(settings: Settings) -> Format:
    """`fbgemm_fp8`: `W[o, i] = q[o, i] * weight_scale[o, 0]`."""

    def dequantize(parts: Parts) -> Tensor:
        return scaled(parts[".weight"], parts[".weight_scale"])

    return Format("fbgemm_fp8", ".weight", (".weight_scale",), dequantize, unused=FP8_UNUSED)


def mxfp4(settings: Settings) -> Format:
    """MXFP4 experts, as in gpt-oss: 4-bit floats (e2m1) in blocks of 32 that share an exponent (OCP
    Microscaling Formats 1.0).

    Experts (E, I, O) are stored transposed: `_blocks` (E, O, I / 32, 16), two numbers a byte, the first in the low
    bits; `_scales` (E, O, I / 32), exponents of 2 with a bias of 127.
    """
    return Format("mxfp4", "_blocks", ("_scales",), _of_mxfp4, dense="")


def _of_mxfp4(parts: Parts) -> Tensor:
    """In bfloat16, which holds all these numbers, and expert by expert: the experts of a layer may take GBs."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    values = torch.tensor(E2M1, device=blocks.device)
    experts, outputs, groups, half = blocks.shape
    found = torch.empty(experts, groups * half * 2, outputs, dtype=torch.bfloat16, device=blocks.device)
    for dense, codes, exponents in zip(found, blocks, scales, strict=True):
        numbers = torch.stack([values[(codes & 15).int()], values[(codes >> 4).int()]], -1).flatten(-2)
        dense.copy_(torch.ldexp(numbers, exponents[..., None].int() - MXFP4_BIAS).flatten(-2).mT)
    return found


def compressed_tensors(settings: Settings) -> Format:
    """compressed-tensors, the format of llm-compressor: 8-bit floats and integers, and integers packed in words.

    `W = (q - zero) * scale`, a scale for each tensor, row, group of a row, or block. Quantised
    activations are not imitated: a dense weight serves activations as they are.

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
    if layout == PACKED and weights[0]["num_bits"] in WORD_BITS:
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

    return Format(name, ".weight", (".weight_scale", ".weight_zero_point"), dequantize, unused=COMPRESSED_UNUSED)


def _packed(name: str, bits: int) -> Format:
    offset = 1 << (bits - 1)  # signed numbers are stored from 0

    def dequantize(parts: Parts) -> Tensor:
        rows, columns = parts[".weight_shape"].tolist()
        numbers = unpack(parts[".weight_packed"], bits)[..., :columns] - offset
        scale, zero, group = parts[".weight_scale"], parts.get(".weight_zero_point"), parts.get(".weight_g_idx")
        if zero is not None and zero.dtype == torch.int32:  # packed along the rows; older files have bytes
            zero = unpack(zero.T, bits).T[:rows] - offset
        if group is None or bool((group < 0).any()):  # -1: the columns keep their order
            return scaled(numbers, scale, zero=zero)
        chosen = group.long()
        return (numbers.float() - (0 if zero is None else zero.float()[:, chosen])) * scale.float()[:, chosen]

    others = tuple(f".weight_{part}" for part in ("scale", "zero_point", "shape", "g_idx"))
    return Format(name, ".weight_packed", others, dequantize, unused=COMPRESSED_UNUSED)
