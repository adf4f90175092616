"""Splits a GPU's multiprocessors into two disjoint partitions with a stream each (CUDA green contexts).

Kernels that are launched or captured on such a stream run only on its partition's multiprocessors. Memory, events and
compiled kernels belong to the ordinary (primary) context, so both partitions can use all tensors. They also share
memory bandwidth and L2 cache.

torch's own `GreenContext` makes one partition; a second one would overlap it. So this module calls the driver (CUDA
driver API, section "Green Contexts"): version 12.5 or later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coserve.core.errors import StartupError
from coserve.kernels.gpu.device import count_multiprocessors

OpenLibrary = Callable[[str], Any]
"""Opens a shared library. Raises `OSError` if it does not exist."""
LIBRARY = "libcuda.so.1"
DRIVER = (12, 5)
"""Lowest version of the CUDA driver, the first one with `cuGreenCtxStreamCreate`."""
SM = 1
"""`CU_DEV_RESOURCE_TYPE_SM`."""
DEFAULT_STREAM = 1
"""`CU_GREEN_CTX_DEFAULT_STREAM`, which `cuGreenCtxCreate` requires."""
NON_BLOCKING = 1
"""`CU_STREAM_NON_BLOCKING`, required by `cuGreenCtxStreamCreate`: no implicit synchronisation with the default
stream."""


class DriverResource(ctypes.Structure):
    """`CUdevResource`: 144 bytes. The remaining bytes are for fields of later drivers."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("multiprocessors", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 44),
        ("beyond", ctypes.c_ubyte * 112),
    )


@dataclass(frozen=True)
class Part:
    """One partition. `stream`: runs its kernels; `captures`: a second stream, for capturing CUDA graphs."""

    stream: torch.cuda.Stream
    captures: torch.cuda.Stream
    multiprocessors: int


@dataclass(frozen=True)
class Partition:
    """Both partitions of one GPU. They last as long as the process."""

    training: Part
    generation: Part

    @property
    def note(self) -> str:
        """Describe the partition for an operator."""
        training, generation = self.training.multiprocessors, self.generation.multiprocessors
        return f"spatial: training has {training} of {training + generation} multiprocessors, generation {generation}"


class _Driver:
    """The driver calls that torch does not wrap. Raises `StartupError` if the driver lacks them, or if a call fails."""

    def __init__(self, open_library: OpenLibrary) -> None:
        try:
            self._library = open_library(LIBRARY)
        except OSError as error:
            raise StartupError(
                f"policy: 'spatial' needs NVIDIA's CUDA driver ({LIBRARY}), which is not there"
            ) from error
        version = ctypes.c_int()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDriverGetVersion", ctypes.byref(version))
        found = version.value // 1000, version.value % 1000 // 10
        if found < DRIVER:
            raise StartupError(
                f"policy: 'spatial' needs green contexts, expected a CUDA driver of version {_text(DRIVER)} or later, "
                f"got {_text(found)}"
            )

    def call(self, name: str, *arguments: object, why: str = "policy: 'spatial'") -> None:
        """Call a driver function. `why`: prefix of the error message."""
        function = getattr(self._library, name, None)
        if function is None:
            raise StartupError(f"policy: 'spatial' needs green contexts, but the CUDA driver has no {name}")
        code = function(*arguments)
        if code:
            raise StartupError(f"{why}: {name}: {self._error(code)}")

    def _error(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        return f"CUDA error {code}" if text.value is None else text.value.decode()


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def part_sizes(device: torch.device, share: float, *, open_library: OpenLibrary = ctypes.CDLL) -> tuple[int, int]:
    """Return the numbers of multiprocessors that training and generation would get: see `split_multiprocessors`."""
    driver = _Driver(open_library)
    training, generation = _split(driver, _handle(driver, device), share)
    return training.multiprocessors, generation.multiprocessors


def split_multiprocessors(device: torch.device, share: float) -> Partition:
    """Give training the fraction `share` (between 0 and 1) of the GPU's multiprocessors, and generation the rest.

    The number is rounded up to the GPU's granularity: multiples of 8 on an H100 or H200. From then on, `device_info`
    counts the multiprocessors of a launch's stream; all other streams count as generation's. Call it once per process,
    before the first real launch.

    Raises `StartupError` if the device, the driver or the fraction does not allow it.
    """
    if device.type != "cuda":
        raise StartupError(f"policy: 'spatial' needs an NVIDIA GPU, and the base is on {device.type}")
    torch.zeros((), device=device)  # creates the primary context
    driver = _Driver(ctypes.CDLL)
    handle = _handle(driver, device)
    training, generation = (_part(driver, handle, device, one) for one in _split(driver, handle, share))
    count_multiprocessors(generation.multiprocessors)
    for own in (training, generation):
        for stream in (own.stream, own.captures):
            count_multiprocessors(own.multiprocessors, stream.cuda_stream)
    return Partition(training, generation)


def _handle(driver: _Driver, device: torch.device) -> ctypes.c_int:
    found = ctypes.c_int()
    driver.call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(device.index or 0))
    return found


def _split(driver: _Driver, handle: ctypes.c_int, share: float) -> tuple[DriverResource, DriverResource]:
    """Return disjoint resources of training and generation."""
    whole, part, rest, groups = DriverResource(), DriverResource(), DriverResource(), ctypes.c_uint(1)
    driver.call("cuDeviceGetDevResource", handle, ctypes.byref(whole), ctypes.c_int(SM))
    wanted = max(1, round(share * whole.multiprocessors))
    places = (ctypes.byref(part), ctypes.byref(groups), ctypes.byref(whole), ctypes.byref(rest))
    why = (
        f"training_sm_share: {share} of {whole.multiprocessors} multiprocessors: no part for training, or none for "
        "generation"
    )
    driver.call("cuDevSmResourceSplitByCount", *places, ctypes.c_uint(0), ctypes.c_uint(wanted), why=why)
    if groups.value < 1 or rest.type != SM or not rest.multiprocessors:
        raise StartupError(why)
    return part, rest


def _part(driver: _Driver, handle: ctypes.c_int, device: torch.device, resource: DriverResource) -> Part:
    description, context = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(resource), ctypes.c_uint(1))
    driver.call("cuGreenCtxCreate", ctypes.byref(context), description, handle, ctypes.c_uint(DEFAULT_STREAM))
    first, second = (_stream(driver, context, device) for _ in range(2))
    return Part(first, second, resource.multiprocessors)


def _stream(driver: _Driver, context: ctypes.c_void_p, device: torch.device) -> torch.cuda.Stream:
    stream = ctypes.c_void_p()
    driver.call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(NON_BLOCKING), ctypes.c_int(0))
    found: torch.cuda.Stream = torch.cuda.ExternalStream(stream.value, device=device)  # type: ignore[no-untyped-call]
    return found
