"""What Triton specializes a kernel on, of the arguments that a launch passes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from coserve.kernels.gpu.launcher import Launcher
from coserve.kernels.lora.segmented import (
    backward_kernel,
    decode_kernel,
    launch_backward,
    launch_decode,
    launch_prefill,
    prefill_kernel,
)

KERNELS = {
    id(launch_decode.DECODE_SHRINK): decode_kernel.shrink,
    id(launch_decode.DECODE_EXPAND): decode_kernel.expand,
    id(launch_prefill.PREFILL_SHRINK): prefill_kernel.shrink,
    id(launch_prefill.PREFILL_EXPAND): prefill_kernel.expand,
    id(launch_backward.SHRINK_B): backward_kernel.shrink_b,
    id(launch_backward.EXPAND_A): backward_kernel.expand_a,
    id(launch_backward.OUTER): backward_kernel.outer,
    id(launch_backward.FOLD): backward_kernel.fold,
}


def kinds(launcher: Launcher, tensors: Sequence[Tensor], numbers: Sequence[int]) -> tuple[object, ...]:
    """Of each number that its kernel is specialized on: whether it is 1, and whether 16 divides it."""
    kernel = KERNELS[id(launcher)]
    interpreted = getattr(kernel, "kwargs", None)
    general = interpreted["do_not_specialize"] if interpreted else kernel.do_not_specialize
    names = kernel.arg_names[len(tensors) : len(tensors) + len(numbers)]
    return tuple(
        (number == 1, number % 16 == 0) for name, number in zip(names, numbers, strict=True) if name not in general
    )
