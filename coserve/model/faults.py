"""Tells errors of one request or job from errors of the device, which all work shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from coserve.cancellation import Cancelled
from coserve.errors import CoserveError, EngineFault


@contextmanager
def contained(device: torch.device) -> Iterator[None]:
    """Turns an error raised inside into an `EngineFault` if the device has failed; else the error belongs to the work inside.

    Once a kernel has failed, every CUDA call returns the same error, so one more call tells. It waits for this thread's stream
    only: waiting for the whole device (`torch.cuda.synchronize`) would break a graph capture of another thread.
    """
    try:
        yield
    except (CoserveError, EngineFault, Cancelled):
        raise
    except Exception as error:
        if device.type == "cuda":
            try:
                torch.cuda.current_stream(device).synchronize()
            except Exception:  # noqa: BLE001 - each CUDA call has errors of its own
                raise EngineFault("the GPU does not work any more") from error
        raise
