"""The one place that chooses how LoRA terms are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from coserve.errors import ConfigError
from coserve.kernels.gpu.device import interpreted
from coserve.kernels.lora import grouped, reference
from coserve.kernels.lora.segments import Segments
from coserve.kernels.lora.types import LoraPair, StackedWeights


class Way(StrEnum):
    """How to compute `y + scaling_a (x a_RDᵀ) b_ORᵀ`."""

    REFERENCE = "reference"
    """An fp32 loop over segments: slow and obvious."""
    NAIVE = "naive"
    """One forward of the base per adapter (`kernels.naive` cuts the batch); at one site, as `grouped`."""
    GROUPED = "grouped"
    """The base batched, a loop over adapters at each site."""
    BLOCK_SPARSE = "block_sparse"
    """stk's `sdd` and `dsd` (ETS §4.3.4)."""
    SEGMENTED = "segmented"
    """Our Triton kernels."""


Groups = Sequence[Sequence[tuple[LoraPair | None, ...]]]

TRITON_WAYS = frozenset({Way.BLOCK_SPARSE, Way.SEGMENTED})


def choose_way(requested: str, device: torch.device, dtype: torch.dtype) -> Way:
    """`auto`: `segmented` on CUDA, `grouped` elsewhere.

    Raises:
        ConfigError: an unknown way; a Triton way without a GPU, or in bfloat16 under Triton's interpreter, whose
            results in that dtype are silently wrong.
    """
    if requested == "auto":
        return Way.SEGMENTED if device.type == "cuda" else Way.GROUPED
    if requested not in set(Way):
        raise ConfigError(f"expected a lora way among auto, {', '.join(Way)}, got {requested!r}", field="lora_way")
    way = Way(requested)
    refuse_unusable(way, device, dtype)
    return way


def refuse_unusable(way: Way, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where `way` cannot run on `device`, or would be silently wrong in `dtype`."""
    if way not in TRITON_WAYS or device.type == "cuda":
        return
    if not interpreted():
        raise ConfigError(f"the lora way {way} needs a CUDA device, got {device.type}", field="lora_way")
    if dtype not in (torch.float32, torch.float16):
        expected = "float32 or float16 under Triton's interpreter"
        raise ConfigError(f"the lora way {way} expected {expected}, got {str(dtype).removeprefix('torch.')}")


def prepare(segments: Segments, groups: Callable[[], Groups], way: Way) -> None:
    """What can be done once for all sites of a step: `groups()[g][site]` are the pairs of sites that will be called together."""
    if way is not Way.SEGMENTED:
        return
    found = groups()
    device = next((pair.a_RD.device for group in found for site in group for pair in site if pair is not None), None)
    if device is not None:
        from coserve.kernels.lora.segmented import plan as segmented  # Triton only where it is used

        segmented.prepare(segments, found, device)


def linear_group(
    x_TD: Tensor, stacked: StackedWeights, segments: Segments, pairs: Sequence[Sequence[LoraPair | None]]
) -> tuple[Tensor, ...]:
    """Training's way through sites that share an input, for `Way.SEGMENTED`; see `segmented_linear`."""
    from coserve.kernels.lora.segmented import linear_group as segmented_linear  # Triton only where it is used

    return segmented_linear.linear_group(x_TD, stacked, segments, pairs)


def lora_add(y_TO: Tensor, x_TD: Tensor, segments: Segments, pairs: Sequence[LoraPair | None], way: Way) -> Tensor:
    """`y_TO + scaling_a (x_TD a_RDᵀ) b_ORᵀ` for the adapter `a` of each token.

    `pairs[i]` is adapter i's pair at this site, None where it does not target it; tensors share one dtype and device.
    Differentiable in y, x and every a_RD and b_OR; may write into y when no gradient is asked for.

    Raises:
        ConfigError: see `refuse_unusable`.
    """
    refuse_unusable(way, x_TD.device, x_TD.dtype)
    match way:
        case Way.REFERENCE:
            return reference.lora_add(y_TO, x_TD, segments, pairs)
        case Way.NAIVE | Way.GROUPED:
            return grouped.lora_add(y_TO, x_TD, segments, pairs)
        case Way.BLOCK_SPARSE:
            from coserve.kernels.lora.block_sparse import lora_add as by_stk  # Triton only where it is used

            return by_stk(y_TO, x_TD, segments, pairs)
        case Way.SEGMENTED:
            from coserve.kernels.lora.segmented.terms import lora_add as by_segments  # Triton only where it is used

            return by_segments(y_TO, x_TD, segments, pairs)
