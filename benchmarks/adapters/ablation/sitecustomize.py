"""Turns parts of adapters' loading off in the engine of a benchmark's daemon: Python runs this file at its start where
the folder is on PYTHONPATH. `ABLATION`: `prefetch`, reads begin when a request leaves the queue and not as it arrives;
`overlap`, copies begin when the step in flight has ended; `pool`, adapters have half of the pages and the KV cache the
other half, and neither takes pages of the other (S-LoRA-no-unify-mem)."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace

if "coserve.engine.process" in sys.orig_argv:
    from coserve.engine.parts import EngineParts, PoolSize
    from coserve.lora.store.pages import AdapterPages
    from coserve.lora.store.store import AdapterStore
    from coserve.memory.buffer import PageBuffer

    match os.environ["ABLATION"]:
        case "prefetch":
            AdapterStore.arrived = lambda self, ref, digests=None: None  # type: ignore[method-assign]
        case "overlap":
            PageBuffer.is_quiet = lambda self, span: False  # type: ignore[method-assign]
        case "pool":
            size, begins, use_pool = EngineParts.pool_size, PageBuffer.step_begins, AdapterStore.use_pool
            apart = list[PageBuffer]()

            def half(self: EngineParts) -> PoolSize:
                found = size(self)
                return replace(found, tokens=found.tokens // 2)

            def use_other(self: AdapterStore, buffer: PageBuffer, *told: Callable[..., None]) -> None:
                apart.append(PageBuffer(buffer.pool.total, buffer.page_bytes, buffer.device))
                use_pool(self, apart[0], *told)

            def both_begin(self: PageBuffer) -> None:
                for buffer in (self, *apart):
                    begins(buffer)

            EngineParts.pool_size = half  # type: ignore[method-assign]
            AdapterStore.use_pool = use_other  # type: ignore[assignment, method-assign]
            PageBuffer.step_begins = both_begin  # type: ignore[method-assign]
            AdapterPages.needs = lambda self, entry: 0  # type: ignore[method-assign]
        case other:
            raise SystemExit(f"expected prefetch, overlap or pool, got {other!r}")
