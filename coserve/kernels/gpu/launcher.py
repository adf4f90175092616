"""Launches of Triton kernels at little cost to the host.

On each launch Triton works out from all arguments which of a kernel's compiled forms serves them, which takes the host
several times as long as the launch itself; a layer has some ten of them. A `Launcher` remembers the form by what it may
depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Protocol

from torch import Tensor
from triton.runtime.jit import JITFunction

from coserve.kernels.gpu.device import interpreted

FORMS = 8192
"""Launches that are remembered; then all are forgotten. Numbers count as they are, so a step of a new size is new."""
ALIGNMENT = 15
"""Bits of an address that Triton looks at."""

Grid = tuple[int, int, int]
Constant = bool | int


class Form(Protocol):
    """One compiled form of a kernel."""

    def __getitem__(self, grid: Grid, /) -> Callable[..., object]:
        """What launches it with the kernel's arguments in order, constants included."""
        ...


class Launcher:
    """Launches one kernel whose parameters are tensors, then numbers, then constants."""

    def __init__(self, kernel: JITFunction[Callable[..., None]]) -> None:
        self._kernel, self._interpreted = kernel, interpreted()
        self._forms: dict[Hashable, tuple[Form, list[Constant]]] = {}

    def __call__(self, grid: Grid, tensors: Sequence[Tensor], numbers: tuple[int, ...], **rest: Constant) -> None:
        """`rest`: the kernel's constants and Triton's options, always in the same order."""
        if self._interpreted:
            self._kernel[grid](*tensors, *numbers, **rest)
            return
        types, places = [t.dtype for t in tensors], [t.data_ptr() & ALIGNMENT for t in tensors]
        key = (tensors[0].get_device(), numbers, *rest.values(), *types, *places)
        known = self._forms.get(key)
        if known is not None:
            form, constants = known
            form[grid](*tensors, *numbers, *constants)
            return
        if len(self._forms) >= FORMS:
            self._forms.clear()
        names = self._kernel.arg_names[len(tensors) + len(numbers) :]
        self._forms[key] = self._kernel[grid](*tensors, *numbers, **rest), [rest[name] for name in names]


@cache
def options(pdl: bool, warps: int, stages: int) -> dict[str, int | bool]:
    """What every launch says of its kernel's form."""
    found: dict[str, int | bool] = {"num_warps": warps, "num_stages": stages, "PDL": pdl}
    return found if interpreted() else {**found, "launch_pdl": pdl}
