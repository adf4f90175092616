"""Triton launches with little host overhead.

On each launch Triton derives the compiled specialization from all arguments, which takes the host several times as long
as the launch itself. A layer has some ten launches. A `Launcher` caches the specialization by everything that it may
depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from enum import Enum
from functools import cache
from typing import Protocol

from torch import Tensor
from triton.runtime.jit import JITFunction

from coserve.kernels.gpu.compile_process import OnCompiled, compiled_by, ignore_compiled
from coserve.kernels.gpu.device import interpreted

MAX_CACHED = 8192
"""Most entries of a launcher's cache, which is cleared when full. Numbers are part of the key, so each new step size
adds an entry."""
ALIGNMENT = 15
"""Mask of the low address bits that Triton specializes on."""


class _Mode(Enum):
    LAUNCH, COMPILE, SKIP = "launch", "compile", "skip"


_mode = ContextVar("mode", default=_Mode.LAUNCH)

Grid = tuple[int, int, int]
Constant = bool | int


@contextmanager
def compile_only(processes: Executor | None, on_compiled: OnCompiled = ignore_compiled) -> Iterator[None]:
    """Inside, `Launcher` and `launch` only compile. On exit all compilations have ended, or their error is raised.

    Nothing is launched, so the kernels' outputs are undefined. For processes that fill caches while others use the GPU.
    `processes`: compile there; None: in this process. `on_compiled`: called for each kernel that they compiled.
    """
    token = _mode.set(_Mode.COMPILE)
    try:
        with nullcontext() if interpreted() or processes is None else compiled_by(processes, on_compiled):
            yield
    finally:
        _mode.reset(token)


@contextmanager
def launch_nothing() -> Iterator[None]:
    """Inside, `Launcher` and `launch` do nothing. For shape propagation with fake tensors: kernels allocate no
    tensors."""
    token = _mode.set(_Mode.SKIP)
    try:
        yield
    finally:
        _mode.reset(token)


def launches(tensor: Tensor) -> bool:
    """Whether kernels may be launched on this tensor: it is on a GPU, or it is a fake one on a GPU
    (`launch_nothing`)."""
    return tensor.is_cuda or _mode.get() is _Mode.SKIP


def launch(kernel: JITFunction[Callable[..., None]], grid: tuple[int, ...], *arguments: object, **rest: object) -> None:
    """Launch a kernel by Triton's own lookup of the specialization."""
    match _mode.get():
        case _Mode.SKIP:
            return
        case _Mode.COMPILE if not interpreted():
            kernel.warmup(*arguments, grid=grid, **rest)
        case _:
            kernel[grid](*arguments, **rest)


class Specialization(Protocol):
    """One compiled specialization of a kernel."""

    def __getitem__(self, grid: Grid, /) -> Callable[..., object]:
        """Return a function that launches it with the kernel's arguments in order, constants included."""
        ...


class Launcher:
    """Launches one kernel whose parameters are tensors, then numbers, then constants."""

    def __init__(self, kernel: JITFunction[Callable[..., None]], *, max_cached: int = MAX_CACHED) -> None:
        self._kernel, self._interpreted, self._max_cached = kernel, interpreted(), max_cached
        self._cache: dict[Hashable, tuple[Specialization, list[Constant]]] = {}
        self._compiling: set[Hashable] = set()
        """Specializations that `compile_only` has met."""

    def __call__(self, grid: Grid, tensors: Sequence[Tensor], numbers: tuple[int, ...], **rest: Constant) -> None:
        """`rest`: the kernel's constants and Triton's options, always in the same order."""
        mode = _mode.get()
        if mode is _Mode.SKIP:
            return
        if self._interpreted:
            self._kernel[grid](*tensors, *numbers, **rest)
            return
        types, places = [t.dtype for t in tensors], [t.data_ptr() & ALIGNMENT for t in tensors]
        key = (tensors[0].get_device(), numbers, *rest.values(), *types, *places)
        if mode is _Mode.COMPILE:
            if key not in self._compiling:
                self._compiling.add(key)
                self._kernel.warmup(*tensors, *numbers, grid=grid, **rest)
            return
        known = self._cache.get(key)
        if known is not None:
            compiled, constants = known
            compiled[grid](*tensors, *numbers, *constants)
            return
        if len(self._cache) >= self._max_cached:
            self._cache.clear()
        names = self._kernel.arg_names[len(tensors) + len(numbers) :]
        self._cache[key] = self._kernel[grid](*tensors, *numbers, **rest), [rest[name] for name in names]


@cache
def options(pdl: bool, warps: int, stages: int) -> dict[str, int | bool]:
    """Return the Triton options that every launch passes."""
    found: dict[str, int | bool] = {"num_warps": warps, "num_stages": stages, "PDL": pdl}
    return found if interpreted() else {**found, "launch_pdl": pdl}
