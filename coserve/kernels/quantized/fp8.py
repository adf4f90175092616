"""FP8 weights (e4m3) with an fp32 scale for each output row, and their products with activations.

    W[o, d] = scale[o] codes[o, d]

On a GPU with FP8 tensor cores (sm_90) a product of more than `FEW_ROWS` rows rounds each row of x to FP8, too, with a
scale of its own (dynamic per-token quantisation, as vLLM's `--quantization fp8`). With fewer rows, whose time goes into
reading the weight, and on other devices x stays as it is.

The gradient of x, `dy W`, sums over the outputs, so the weight's scales go into dy before its rows are rounded, and the
tensor cores read codes of W transposed, made for each product (`gradient`).

Letters: T tokens, D inputs, O outputs.
"""

# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"
# ruff: noqa: ANN001, ANN201 - a kernel's arguments have the types of its launch

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.core.errors import ConfigError
from coserve.kernels.gpu.device import device_info
from coserve.kernels.gpu.launcher import Launcher, launches, options
from coserve.kernels.gpu.rounding import cdiv, next_power_of_2

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of e4m3."""
SMALLEST_SCALE = 1e-12
"""Scale of rows of zeros."""
FEW_ROWS = 16
"""Most rows of a product in which x stays as it is. At 64 rows, programs would read more bytes of x than of the
weight."""
MULTIPLE = 16
"""D and O are multiples of this, for the tensor cores."""


@triton.jit
def round_rows(
    x_ptr, by_ptr, codes_ptr, scale_ptr, D, stride, BY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Grid (T): x (T, D), dense rows `stride` apart, multiplied by `by` fp32 (D) if BY -> codes e4m3 (T, D), scale fp32
    (T). The next kernel may start at once, so it must wait for this one before it reads anything but weights."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * stride + d, mask=d < D, other=0.0).to(tl.float32)
    if BY:
        x *= tl.load(by_ptr + d, mask=d < D, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)
    codes = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
    tl.store(codes_ptr + row * D + d, codes.to(tl.float8e4nv), mask=d < D)
    tl.store(scale_ptr + row, scale)


@triton.jit
def scale_rows(codes_ptr, scale_ptr, w_ptr, D, BLOCK: tl.constexpr):
    """Grid (O, blocks of D): codes e4m3 (O, D), scale fp32 (O) -> w (O, D)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    w = codes * tl.load(scale_ptr + row)
    tl.store(w_ptr + row * D + d, w.to(w_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def transpose_bytes(x_ptr, y_ptr, O, D, BLOCK: tl.constexpr):
    """Grid (blocks of O, blocks of D): x (O, D) -> y (D, O), of one byte each, dense."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (o < O)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + o[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0)
    tl.store(y_ptr + d[:, None].to(tl.int64) * O + o[None, :], tl.trans(x), mask=tl.trans(inside))


_round_rows, _scale_rows, _transpose_bytes = Launcher(round_rows), Launcher(scale_rows), Launcher(transpose_bytes)
COLUMNS, SQUARE = 2048, 128
"""Columns a program of `scale_rows` scales; rows and columns of one of `transpose_bytes`."""


def row_scales(rows: Tensor) -> Tensor:
    """Return the scale of each row of (T, D), by which its largest number becomes e4m3's: fp32 (T)."""
    return (rows.abs().amax(1).float() / LARGEST).clamp_(min=SMALLEST_SCALE)


def quantize(rows: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes (T, D) and scales fp32 (T) of each row, in plain torch. `scales`: those of longer rows, of which
    `rows` are some columns; None: `row_scales`."""
    own = row_scales(rows) if scales is None else scales
    return (rows.float() / own[:, None]).clamp_(-LARGEST, LARGEST).to(E4M3), own


def quantize_activations(x_TD: Tensor, by_D: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`quantize` by one kernel on a GPU. `by_D` (fp32): factors of the columns, applied first."""
    (rows, inputs), device = x_TD.shape, x_TD.device
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    codes_TD = torch.empty(rows, inputs, dtype=E4M3, device=device)
    scale_T = torch.empty(rows, dtype=torch.float32, device=device)
    block = next_power_of_2(inputs)
    warps = min(16, max(1, block // 512))
    constants = options(device_info(device).early_launch, warps, 1)
    tensors = x_TD, scale_T if by_D is None else by_D, codes_TD, scale_T
    _round_rows((rows, 1, 1), tensors, (inputs, x_TD.stride(0)), BY=by_D is not None, BLOCK=block, **constants)
    return codes_TD, scale_T


def scale_codes(codes_OD: Tensor, scale_O: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize` on a GPU, by one kernel."""
    outputs, inputs = codes_OD.shape
    weight = torch.empty(outputs, inputs, dtype=dtype, device=codes_OD.device)
    _scale_rows((outputs, cdiv(inputs, COLUMNS), 1), (codes_OD, scale_O, weight), (inputs,), BLOCK=COLUMNS)
    return weight


def dequantize(codes_OD: Tensor, scale_O: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (O, D), by one kernel on a GPU."""
    if launches(codes_OD):
        return scale_codes(codes_OD, scale_O, dtype)
    return (codes_OD.to(torch.float32) * scale_O[:, None]).to(dtype)


def refuse_unusable(device: torch.device, setting: str) -> None:
    """Raise `ConfigError` for a GPU without FP8. `setting`: name of the setting that asks for FP8."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < (8, 9):
        expected = "expected a GPU of compute capability 8.9 or more"
        raise ConfigError(f"{setting}: fp8 {expected}, got {found[0]}.{found[1]}", field=setting)


def has_tensor_cores(tensor: Tensor) -> bool:
    """Whether products with this tensor run on FP8 tensor cores."""
    return launches(tensor) and tensor.dtype == torch.bfloat16 and device_info(tensor.device).early_launch


def rounds(x_TD: Tensor) -> bool:
    """Whether products of FP8 weights with x (T, D) round x, too."""
    return len(x_TD) > FEW_ROWS and has_tensor_cores(x_TD)


def product(x_TD: Tensor, codes_OD: Tensor, scale_O: Tensor) -> Tensor:
    """Return `x Wᵀ` (T, O) with x rounded to FP8, in bfloat16, on a GPU with FP8 tensor cores."""
    x_codes_TD, x_scale_T = quantize_activations(x_TD)
    y_TO: Tensor = torch._scaled_mm(
        x_codes_TD,
        codes_OD.T,
        scale_a=x_scale_T[:, None],
        scale_b=scale_O[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y_TO


def transposed(codes_OD: Tensor) -> Tensor:
    """Return the codes as (D, O), dense, by one kernel on a GPU."""
    outputs, inputs = codes_OD.shape
    codes_DO = torch.empty(inputs, outputs, dtype=codes_OD.dtype, device=codes_OD.device)
    both = codes_OD.view(torch.uint8), codes_DO.view(torch.uint8)
    grid = cdiv(outputs, SQUARE), cdiv(inputs, SQUARE), 1
    _transpose_bytes(grid, both, (outputs, inputs), BLOCK=SQUARE, num_warps=8)
    return codes_DO


def gradient(dy_TO: Tensor, codes_OD: Tensor, scale_O: Tensor) -> Tensor:
    """Return `dy W` (T, D), rows of `dy scale` rounded to FP8, in bfloat16, on a GPU with FP8 tensor cores."""
    dy_codes_TO, dy_scale_T = quantize_activations(dy_TO, scale_O)
    dx_TD: Tensor = torch._scaled_mm(
        dy_codes_TO,
        transposed(codes_OD).T,
        scale_a=dy_scale_T[:, None],
        scale_b=torch.ones(1, codes_OD.shape[1], device=codes_OD.device),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return dx_TD
