"""A small Triton kernel with arguments of each kind, and a driver to compile for."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget


@triton.jit
def scale(x_ptr, y_ptr, N, FACTOR: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N)
    if WIDE:
        x = x.to(tl.float32)
    if KIND is None:
        x = x * FACTOR
    tl.store(y_ptr + i, x, mask=i < N)


class NoGpu:
    """A driver of Triton for a GPU that is not there: an H200's code is compiled, nothing is launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)
