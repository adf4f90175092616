"""AWQ weights in the `gemm` packing (Lin et al. 2023, https://arxiv.org/abs/2306.00978, and its AutoAWQ files)."""

from __future__ import annotations

from torch import Tensor

from coserve.core.errors import UnsupportedBase
from coserve.model.formats.interface import Format, Parts, Settings, scaled, unpack

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of the eight numbers of a word, in units of 4 bits."""


def awq(settings: Settings) -> Format:
    """`W[o, i] = (q[i, o] - z[i // group, o]) * s[i // group, o]`; `qweight` (I, O / 8), `qzeros` and `scales` with a
    row for each group of inputs. Raises `UnsupportedBase` for other packings."""
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise UnsupportedBase(f"awq: expected version 'gemm' with 4 bits, got {version!r} with {bits}")
    return Format("awq", ".qweight", (".qzeros", ".scales"), _dequantize)


def _dequantize(parts: Parts) -> Tensor:
    words = (unpack(parts[part][..., None], 4) for part in (".qweight", ".qzeros"))
    numbers, zeros = (one[..., list(ORDER)].flatten(-2) for one in words)
    return scaled(numbers, parts[".scales"], zero=zeros).mT
