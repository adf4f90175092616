"""Times copies of a sequence's recurrent states to pages and back, of Qwen3.5-9B's shape: `--only snapshots`.

A step waits for the host's part (`host_us`), so that is the result; `device_us` is the whole copy on a GPU. `--tiny`
has as many layers and pages with a 128th of the bytes: on a CPU a call is nearly all the host's part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from benchmarks.common.results import Results
from benchmarks.common.timing import event_us, synchronize
from coserve.kernels.attention.interface import KvShape
from coserve.kernels.recurrent.interface import StateShape
from coserve.memory.kv import KvCache
from coserve.memory.state_pool import StatePool

FULL = StateShape(channels=8192, taps=4, heads=32, keys=128, values=128), KvShape(4, 256, 256)
TINY = StateShape(channels=64, taps=4, heads=32, keys=16, values=8), KvShape(4, 2, 2)
STATES, ATTENTIONS, PAGE_TOKENS, SLOTS, CALLS = 24, 8, 16, 8, 100
"""Layers with a state, layers with keys and values, tokens of a page, sequences, and calls; their median counts."""


def measure_snapshots(results: Results, device: torch.device, *, tiny: bool) -> None:
    """Put a row for each direction."""
    state, kv_shape = TINY if tiny else FULL
    states = StatePool(dict.fromkeys(range(STATES), state), slots=SLOTS, dtype=torch.bfloat16, device=device)
    shapes = [kv_shape] * ATTENTIONS
    kv = KvCache(shapes, pages=1024, page_tokens=PAGE_TOKENS, dtype=torch.bfloat16, device=device, states=states)
    pages = kv.allocate(kv.state_pages)
    assert pages is not None and kv.snapshots is not None, "expected states, and a pool for several snapshots"
    for name, copy in (("save", kv.snapshots.save), ("restore", kv.snapshots.restore)):
        call = partial(copy, 0, pages)
        about: dict[str, object] = {"pages": len(pages)}
        if device.type == "cuda":
            about["device_us"] = event_us([call]).record()
        host = round(_host_us(call, device), 1)
        print(f"snapshot_host_us.{name}", host, about, flush=True)
        results.put(f"models.qwen35.snapshot_host_us.{name}", host, "us", None, (), about)


def _host_us(call: Callable[[], None], device: torch.device) -> float:
    spans = list[float]()
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        spans.append(time.perf_counter() - began)
        synchronize(device)
    return 1e6 * median(spans)
