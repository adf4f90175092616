"""Times the kernels of a decode step of Qwen3.5-9B's shape, each by all its launch shapes: `--only kernels`.

In a CUDA graph over states, and weights, that exceed the L2 cache together, a small kernel ahead of each (`before`).
`floor`: the bytes of the states or the weights, once each way, at `--bandwidth`. All in microseconds a call.

`recur_us.b1`, `.b16`, `.b64`   the recurrence: each size of a program's part, then the fastest with further choices
`convolve_us.b64`              the convolution
`product_us.b64.*`             products of 64 rows by torch (`torch`) and by our skinny GEMM
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from itertools import product

import torch
import triton
from torch import Tensor

from benchmarks.common.results import Results
from benchmarks.common.timing import microseconds
from coserve.kernels.attention.interface import TokenRun
from coserve.kernels.gemm import skinny
from coserve.kernels.lora.types import FrozenWeight
from coserve.kernels.recurrent.fused.steps import FusedRecurrence, RecurShape
from coserve.kernels.recurrent.interface import RecurrenceInputs, RecurrenceParams
from coserve.kernels.recurrent.slots import LayerStates
from coserve.model.gemm_choice import L2_BYTES

GROUPS, HEADS, SIZE, TAPS = 16, 32, 128, 4
"""Heads of queries and keys, heads of values, their sizes, and inputs of the convolution."""
PRODUCTS = ((4096, 12352), (4096, 4096), (4096, 24576), (12288, 4096), (4096, 10240))
"""Inputs and outputs of a layer's products: in_proj, out_proj, gate and up, down; and q, k and v."""
BY_VALUE = replace(RecurShape(), by_value=True)
PARTS = (
    RecurShape(),
    BY_VALUE,
    *(replace(BY_VALUE, elements=elements, warps=warps) for elements, warps in ((2048, 4), (4096, 8), (8192, 8))),
    replace(BY_VALUE, elements=16384, warps=16),
    replace(BY_VALUE, registers=72),
    *(replace(BY_VALUE, blocks=4, stages=stages) for stages in (2, 3, 4)),
    *(replace(BY_VALUE, elements=2048, blocks=8, stages=stages) for stages in (4, 5)),
    replace(BY_VALUE, warps=8, blocks=4, stages=3),
    replace(BY_VALUE, elements=8192, warps=8, blocks=2, stages=2),
)
"""Shapes of a program's part of a state: size and warps, registers, parts in turns."""
CONVOLUTIONS = ((16, 128), (8, 128), (4, 128), (4, 256), (2, 256), (8, 64))
"""Tokens and channels of a program of the convolution."""


def measure_kernels(results: Results, device: torch.device, bandwidth: float, *, tiny: bool) -> None:
    """Put a row for each kernel and number of sequences, with the time of each launch shape."""
    for sequences in (1,) if tiny else (1, 16, 64):  # two specialisations of each kernel
        recur, convolve = _recurrences(sequences, device, tiny=tiny)
        found = _timed(recur, PARTS[::7] if tiny else PARTS)
        best = min(found, key=lambda shape: found[shape])
        further = [replace(best, stream=stream, early=early) for stream, early in product((False, True), repeat=2)]
        found |= _timed(recur, further[1:])
        floor = 2 * sequences * HEADS * SIZE * SIZE * 4 / bandwidth
        _put(results, f"recur_us.b{sequences}", {_name(one): us for one, us in found.items()}, recur(None), floor)
        if sequences == 64 or tiny:
            shapes = [replace(RecurShape(), tokens=tokens, channels=channels) for tokens, channels in CONVOLUTIONS]
            times = {_name(one): us for one, us in _timed(convolve, shapes).items()}
            # The kept inputs are read and written, the new ones read and the results written, in 16 bits.
            floor = 2 * sequences * (2 * GROUPS + HEADS) * SIZE * 2 * TAPS / bandwidth
            _put(results, f"convolve_us.b{sequences}", times, convolve(None), floor)
    for inputs, outputs in PRODUCTS[1:2] if tiny else PRODUCTS:
        name, floor = f"product_us.b64.{inputs}x{outputs}", 2 * inputs * outputs / bandwidth
        _put(results, name, *_products(inputs, outputs, device, tiny=tiny), floor)


def _put(results: Results, name: str, found: dict[str, float], before: float, floor: float) -> None:
    """Put the least time; the times of all, the fastest first, of `before` and of the floor (seconds) beside it."""
    about: dict[str, object] = {"before": round(before, 2), "floor": round(1e6 * floor, 2)}
    about |= {shape: round(us, 2) for shape, us in sorted(found.items(), key=lambda one: one[1])}
    print(name, about, flush=True)
    results.put(f"models.qwen35.{name}", round(min(found.values()), 2), "us", None, (), about)


def _name(shape: RecurShape) -> str:
    """Return what differs from the default shape."""
    own = asdict(RecurShape())
    return " ".join(f"{name}={value}" for name, value in asdict(shape).items() if value != own[name]) or "default"


def _timed(run: Callable[[RecurShape], float], shapes: Iterable[RecurShape]) -> dict[RecurShape, float]:
    """Microseconds of each shape that the GPU can run."""
    found = {}
    for shape in shapes:
        try:
            found[shape] = run(shape)
        except triton.runtime.errors.OutOfResources:
            continue
    return found


def cut_inputs(made: Tensor, decay: Tensor, beta: Tensor, groups: int, size: int) -> RecurrenceInputs:
    """Return a layer's inputs of T tokens, cut from its convolution's output (T, (2 · groups + heads) · size)."""
    parts = made.view(len(made), -1, size)
    q, k, v = torch.split(parts, [groups, groups, parts.shape[1] - 2 * groups], 1)
    return RecurrenceInputs(q, k, v, decay, beta, RecurrenceParams(size**-0.5, normalize=True))


def _recurrences(
    sequences: int, device: torch.device, *, tiny: bool
) -> tuple[Callable[[RecurShape | None], float], Callable[[RecurShape | None], float]]:
    """Return functions that time a layer's recurrence and its convolution by a shape; None: what is ahead of it."""
    heads, groups, size = (4, 2, 8) if tiny else (HEADS, GROUPS, SIZE)
    channels = (2 * groups + heads) * size
    dtype = torch.float32 if tiny else torch.bfloat16

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype)

    layers = {
        layer: LayerStates(
            torch.zeros(sequences + 2, TAPS - 1, channels, device=device, dtype=dtype),
            torch.zeros(sequences + 2, heads, size, size, device=device),
        )
        for layer in range(2 if tiny else max(3, L2_BYTES // (sequences * heads * size * size * 4)))
    }
    mixed, made, weight = draw(sequences, channels), draw(sequences, channels), draw(channels, TAPS)
    decay, beta = -torch.rand(sequences, heads, device=device), draw(sequences, heads).sigmoid()
    given = cut_inputs(made, decay, beta, groups, size)
    runs = [TokenRun(1, 1, (), slot) for slot in range(sequences)]

    def timed(shape: RecurShape | None, call: Callable[[FusedRecurrence, int], object]) -> float:
        own = FusedRecurrence(layers, tokens=sequences, sequences=sequences, device=device, decodes=True, shape=shape)
        own.load(runs)

        def run() -> None:
            for layer in layers:
                torch.mul(mixed, 0.5, out=made)
                if shape is not None:
                    call(own, layer)

        return microseconds(run, device, len(layers))

    return (
        lambda shape: timed(shape, lambda own, layer: own.recur(layer, given)),
        lambda shape: timed(shape, lambda own, layer: own.convolve(layer, made, weight, None, "silu")),
    )


def _products(inputs: int, outputs: int, device: torch.device, *, tiny: bool) -> tuple[dict[str, float], float]:
    """Return the microseconds of a product of 64 rows by each kernel, and of what is ahead of it."""
    inputs, outputs = (256, 64) if tiny else (inputs, outputs)
    copies = 2 if tiny else max(2, -(-L2_BYTES // (2 * inputs * outputs)))
    weights = [
        FrozenWeight(torch.randn(outputs, inputs, device=device).bfloat16() * 0.02, None, (outputs,))
        for _ in range(copies)
    ]
    x_TD, counters = torch.randn(64, inputs, device=device).bfloat16(), skinny.make_counters(outputs, device)
    made = torch.empty_like(x_TD)

    def timed(call: Callable[[FrozenWeight], object]) -> float:
        def run() -> None:
            for one in weights:
                torch.mul(x_TD, 0.5, out=made)
                call(one)

        return microseconds(run, device, copies)

    def by_ours(one: FrozenWeight, shape: skinny.Shape) -> object:
        return skinny.skinny_gemm(made, one.weight, None, counters, shape)

    found = {"torch": timed(lambda one: one.linear(made))}
    for shape in skinny.shapes_of(inputs, outputs, torch.bfloat16, 64):
        name = f"n={shape.n} k={shape.k} splits={shape.splits} warps={shape.warps} stages={shape.stages}"
        try:
            found[name] = timed(partial(by_ours, shape=shape))
        except triton.runtime.errors.OutOfResources:
            continue
    return found, timed(lambda one: None)
