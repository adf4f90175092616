"""Description of the GPU from the CUDA driver, read without torch: part of the cache key."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the CUDA driver API."""
CONTEXT_BYTES = 1 << 30
"""Approximate GPU memory of a process besides torch's tensors: CUDA context, libraries, kernels."""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    """Compute capability, such as "9.0"."""
    driver: int
    """CUDA version that the driver supports, from `cuDriverGetVersion`."""
    memory_bytes: int


def find_gpu() -> Gpu | None:
    """The first visible GPU; None if there is none, or its driver does not answer."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, driver, major, minor = (ctypes.c_int() for _ in range(5))
    name, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
    calls: tuple[Callable[[], int], ...] = (
        lambda: int(cuda.cuInit(0)),
        lambda: int(cuda.cuDriverGetVersion(ctypes.byref(driver))),
        lambda: int(cuda.cuDeviceGetCount(ctypes.byref(count))),
        lambda: int(cuda.cuDeviceGet(ctypes.byref(device), 0)),
        lambda: int(cuda.cuDeviceGetName(name, len(name), device)),
        lambda: int(cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)),
        lambda: int(cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)),
        lambda: int(cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)),
    )
    if any(call() != 0 for call in calls):
        return None
    return Gpu(name.value.decode(errors="replace"), f"{major.value}.{minor.value}", driver.value, size.value)
