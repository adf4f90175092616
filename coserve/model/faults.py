"""Which errors are of one piece of work, and which are of the device that all work shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from coserve.cancellation import Cancelled
from coserve.errors import CoserveError, EngineFault


@contextmanager
def contained(device: torch.device) -> Iterator[None]:
    """An error inside is of the work inside, unless the device has gone wrong: then it becomes an `EngineFault`.

    CUDA answers every call with the same error once a kernel has failed, so one more call tells which it was. That call
    waits for this thread's stream alone: one that waits for the whole device (`torch.cuda.synchronize`) would break a graph
    capture that another thread has under way.
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
