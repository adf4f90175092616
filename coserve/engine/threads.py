"""The threads of an engine's process, and how they take turns."""

from __future__ import annotations

import sys
import time
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import torch

from coserve.config import Config
from coserve.core.processes import same_bits_in_any_batch, usable_cores
from coserve.kernels.attention.packed import PackedAttention

if TYPE_CHECKING:
    from coserve.model.base import Base

EXACT_THREADS = 2
"""Most CPU threads with which torch's kernels give a row the same bits in every batch."""
PROBES = 3
"""Forwards timed for each number of threads in `choose_threads`."""
SMALL_STEP = 0.03
"""Seconds of a forward of one token. Once it is faster, `choose_threads` tries no further number of threads."""
SWITCH_INTERVAL = 2e-5
"""Seconds after which a thread releases the GIL to another. A step releases and reacquires it with every operation:
with Python's default of 5 ms, next to a thread that compiles or reads an adapter, it would wait that long a thousand
times."""


def set_up_threads(config: Config) -> None:
    """Set this process's thread count and switch interval; ranks share the cores. Call it before anything is
    computed."""
    same_bits_in_any_batch()
    torch.set_num_threads(config.threads or max(1, default_threads() // config.tp))
    sys.setswitchinterval(SWITCH_INTERVAL)


@torch.no_grad()
def choose_threads(base: Base, config: Config) -> None:
    """On a CPU, set the thread count that decodes one token fastest, by a few forwards.

    The default stays if the settings name a count, if ranks share the cores, and for bases so small that it hardly
    matters: the last bits of sums may depend on the count.
    """
    if base.device.type != "cpu" or config.threads or config.tp > 1:
        return
    token_1, most = torch.zeros(1, dtype=torch.int64), min(EXACT_THREADS, usable_cores())
    forward = partial(base.forward, token_1, token_1, PackedAttention((0, 1)), lora=None, keep=None)
    seconds = dict.fromkeys((default_threads(), *range(1, most + 1)), inf)
    for threads in PROBES * tuple(seconds):
        torch.set_num_threads(threads)
        began = time.perf_counter()
        forward()
        seconds[threads] = min(seconds[threads], time.perf_counter() - began)
        if seconds[threads] < SMALL_STEP:
            break
    torch.set_num_threads(min(seconds, key=seconds.__getitem__))


def default_threads() -> int:
    """All cores but one, at most two: with more, torch's CPU kernels round a row differently in different batches."""
    return min(EXACT_THREADS, max(1, usable_cores() - 1))
