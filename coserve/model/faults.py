"""Classifies errors: those of one request or job, those of the device, which all work shares, and failed
allocations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from coserve.core.cancellation import Cancelled
from coserve.core.errors import CoserveError, EngineFault

_ALLOCATIONS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
"""Texts that identify failed allocations: in torch's `RuntimeError`s for memory of the host, the driver and cuBLAS, and
in Triton's errors."""
_ASKED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


class MemoryOfRank(MemoryError):
    """Memory ran out on one of several tensor-parallel ranks; raised on all of them."""

    def __init__(self, numbers: str) -> None:
        """`numbers`: that rank's `memory_numbers`."""
        super().__init__(f"not enough memory ({numbers})")
        self.numbers = numbers


def out_of_memory(error: BaseException) -> bool:
    """Whether the error is a failed allocation on the host or the device. Both still work after one."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATIONS)


def memory_numbers(error: BaseException, device: torch.device) -> str:
    """Describe how much the failed allocation requested, if the error tells, and how much is free now."""
    if isinstance(error, MemoryOfRank):
        return error.numbers
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    asked = _ASKED.search(str(error))
    return f"{'' if asked is None else f'needed {asked[1]}, '}free {free} bytes"


@contextmanager
def contained(device: torch.device) -> Iterator[None]:
    """Turn an error raised inside into an `EngineFault` if the device has failed; otherwise it passes unchanged.

    Once a kernel has failed, every CUDA call returns the same error, so one more call tells. It waits only for this
    thread's stream: waiting for the whole device (`torch.cuda.synchronize`) would break a graph capture of another
    thread.
    """
    try:
        yield
    except (CoserveError, EngineFault, Cancelled):
        raise
    except Exception as error:  # of any type: whether the GPU still works tells if the device failed
        if device.type == "cuda":
            try:
                torch.cuda.current_stream(device).synchronize()
            except Exception:  # noqa: BLE001 - each CUDA call has errors of its own
                raise EngineFault("the GPU does not work any more") from error
        raise
