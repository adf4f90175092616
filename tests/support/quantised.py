"""Writes tiny checkpoints as quantisers do, packed by each format's published definition, and the same models dense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Stored = dict[str, Tensor]
Quantise = Callable[[int, int, torch.Generator], tuple[Stored, Tensor]]
"""Draws a weight of O x I: the tensors that a format stores for it, by suffix, and the weight itself."""


def quantise(source: Path, folder: Path, make: Quantise, settings: dict[str, object]) -> tuple[Path, Path]:
    """Write the model in `source` with a quantised weight in each linear site of a layer; return the folder and one
    with the same model dense."""
    quantised, dense = folder / "quantised", folder / "dense"
    tensors = load_file(source / "model.safetensors")
    drawn = torch.Generator().manual_seed(0)
    stored: Stored = {}
    for name, tensor in sorted(tensors.items()):
        stored[name] = tensor
        if name.endswith("_proj.weight"):
            parts, tensors[name] = make(*tensor.shape, drawn)
            stored |= {name.removesuffix(".weight") + suffix: part.contiguous() for suffix, part in parts.items()}
            if ".weight" not in parts:
                del stored[name]
    _write(source, quantised, stored, {"quantization_config": settings})
    _write(source, dense, tensors, {})
    return quantised, dense


def mxfp4_experts(source: Path, folder: Path) -> tuple[Path, Path]:
    """Write the gpt-oss in `source` as it is published, its experts in MXFP4; return the folder and one with the same
    model dense, by transformers."""
    quantised, dense = folder / "quantised", folder / "dense"
    stored, drawn = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    tensors = dict(stored)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=drawn).to(torch.uint8)
        scales = torch.randint(118, 124, (experts, outputs, inputs // 32), generator=drawn).to(torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales).float()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    _write(source, quantised, stored, {"quantization_config": settings})
    _write(source, dense, tensors, {})
    return quantised, dense


def fp8_experts(source: Path, folder: Path) -> tuple[Path, Path]:
    """Write the model in `source` with its stacked experts in FP8, a scale for each expert; return the folder and one
    with the same model dense."""
    quantised, dense = folder / "quantised", folder / "dense"
    stored, drawn = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    tensors = dict(stored)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        shape = stored[name].shape
        stored[name], scale = fp8(shape, drawn), draw_scales((shape[0], 1, 1), drawn)
        stored |= {f"{name}_scale_inv": scale, f"{name}_activation_scale": torch.ones(())}
        tensors[name] = stored[name].float() * scale
    _write(source, quantised, stored, {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}})
    _write(source, dense, tensors, {})
    return quantised, dense


def _write(source: Path, folder: Path, tensors: Stored, settings: dict[str, object]) -> None:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def pack(numbers: list[int], bits: int) -> int:
    """The signed 32-bit word of these numbers, the first in the lowest bits."""
    word = sum(number << (i * bits) for i, number in enumerate(numbers))
    return word - (1 << 32) if word >= 1 << 31 else word


def pack_rows(numbers: Tensor, bits: int) -> Tensor:
    """Pack neighbours in a row: (A, B) -> int32 (A, B * bits / 32)."""
    words = [[pack(part.tolist(), bits) for part in row.split(32 // bits)] for row in numbers]
    return torch.tensor(words, dtype=torch.int32)


def draw(bits: int, shape: tuple[int, ...], drawn: torch.Generator) -> Tensor:
    return torch.randint(0, 1 << bits, shape, generator=drawn)


def draw_scales(shape: tuple[int, ...], drawn: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=drawn) * 0.02 + 0.005


def fp8(shape: tuple[int, ...], drawn: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=drawn).to(torch.float8_e4m3fn)


def each(grid: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """The number of each element's block."""
    return torch.stack(
        [torch.stack([grid[o // block[0], i // block[1]] for i in range(shape[1])]) for o in range(shape[0])]
    )


def fp8_blocks(rows: int, columns: int, drawn: torch.Generator) -> tuple[Stored, Tensor]:
    """Blocks of 24 x 20, which divide no side."""
    weight, scale = fp8((rows, columns), drawn), draw_scales((-(-rows // 24), -(-columns // 20)), drawn)
    return {".weight": weight, ".weight_scale_inv": scale, ".input_scale": torch.ones(())}, weight.float() * each(
        scale, (rows, columns), (24, 20)
    )


def fp8_rows(rows: int, columns: int, drawn: torch.Generator) -> tuple[Stored, Tensor]:
    weight, scale = fp8((rows, columns), drawn), draw_scales((rows, 1), drawn)
    return {".weight": weight, ".weight_scale": scale}, weight.float() * scale


def auto_fp8(rows: int, columns: int, drawn: torch.Generator) -> tuple[Stored, Tensor]:
    weight, scale = fp8((rows, columns), drawn), draw_scales((), drawn)
    return {".weight": weight, ".weight_scale": scale, ".input_scale": torch.ones(())}, weight.float() * scale


def fp8_tensor(rows: int, columns: int, drawn: torch.Generator) -> tuple[Stored, Tensor]:
    weight, scale = fp8((rows, columns), drawn), draw_scales((1,), drawn)
    return {".weight": weight, ".weight_scale": scale, ".input_scale": torch.ones(1)}, weight.float() * scale


def packed_groups(rows: int, columns: int, drawn: torch.Generator) -> tuple[Stored, Tensor]:
    """compressed-tensors W4A16: groups of 16 inputs with zero points."""
    numbers, zeros = draw(4, (rows, columns), drawn), draw(4, (rows, columns // 16), drawn)
    scale = draw_scales((rows, columns // 16), drawn)
    weight = (numbers - each(zeros, (rows, columns), (1, 16))) * each(scale, (rows, columns), (1, 16))
    stored = {
        ".weight_packed": pack_rows(numbers, 4),
        ".weight_scale": scale,
        ".weight_zero_point": pack_rows(zeros.T, 4).T,
        ".weight_shape": torch.tensor([rows, columns]),
    }
    return stored, weight


def packed_zeros_in_bytes(rows: int, columns: int, drawn: torch.Generator) -> tuple[Stored, Tensor]:
    """As `packed_groups`, of an older llm-compressor: signed zero points that are not packed, and no order."""
    stored, weight = packed_groups(rows, columns, drawn)
    zeros = [[word >> shift & 15 for shift in range(0, 32, 4)] for word in stored[".weight_zero_point"].T.flatten()]
    by_groups = torch.tensor(zeros).reshape(columns // 16, -1)[:, :rows]
    return stored | {
        ".weight_zero_point": (by_groups.T - 8).to(torch.int8),
        ".weight_g_idx": torch.full((columns,), -1, dtype=torch.int32),
    }, weight


def packed_reordered(rows: int, columns: int, drawn: torch.Generator) -> tuple[Stored, Tensor]:
    """compressed-tensors W4A16, symmetric, with the groups of `actorder`."""
    numbers, scale = draw(4, (rows, columns), drawn), draw_scales((rows, columns // 16), drawn)
    group = torch.randperm(columns, generator=drawn) // 16
    weight = torch.stack([(numbers[:, i] - 8) * scale[:, group[i]] for i in range(columns)], 1)
    stored = {
        ".weight_packed": pack_rows(numbers, 4),
        ".weight_scale": scale,
        ".weight_g_idx": group.int(),
        ".weight_shape": torch.tensor([rows, columns]),
    }
    return stored, weight


def awq(rows: int, columns: int, drawn: torch.Generator) -> tuple[Stored, Tensor]:
    """AutoAWQ's gemm: a word's eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    numbers, zeros = draw(4, (columns, rows), drawn), draw(4, (columns // 16, rows), drawn)
    scale = draw_scales((columns // 16, rows), drawn)
    weight = (numbers - each(zeros, (columns, rows), (16, 1))) * each(scale, (columns, rows), (16, 1))
    reordered = [one.unflatten(1, (-1, 8))[..., order].flatten(1) for one in (numbers, zeros)]
    stored = {".qweight": pack_rows(reordered[0], 4), ".qzeros": pack_rows(reordered[1], 4), ".scales": scale}
    return stored, weight.T


def gptq(bits: int, version: int, *, reordered: bool, size: int = 16) -> Quantise:
    """AutoGPTQ's (version 1: zeros less 1, borrowed from the next where they are 0) or GPTQModel's."""

    def make(rows: int, columns: int, drawn: torch.Generator) -> tuple[Stored, Tensor]:
        groups = -(-columns // size)
        numbers, zeros = draw(bits, (columns, rows), drawn), draw(bits, (groups, rows), drawn)
        scale, group = draw_scales((groups, rows), drawn), torch.arange(columns) // size
        if reordered:
            group = group[torch.randperm(columns, generator=drawn)]
        weight = torch.stack([(numbers[i] - zeros[group[i]]) * scale[group[i]] for i in range(columns)])
        ones = pack([1] * (32 // bits), bits) if version == 1 else 0
        stored = {
            ".qweight": pack_rows(numbers.T, bits).T,
            ".qzeros": pack_rows(zeros, bits) - ones,
            ".scales": scale,
            ".g_idx": group.int(),
        }
        return stored, weight.T

    return make
