"""Turns parts of adapters' loading off in the engine of a benchmark's daemon: Python runs this file at its start where
the folder is on PYTHONPATH. `ABLATION`: `prefetch`, reads begin when a request leaves the queue and not as it arrives;
`overlap`, copies begin when the step in flight has ended."""

import os
import sys

if "coserve.engine.process" in sys.orig_argv:
    from coserve.lora.store.store import AdapterStore
    from coserve.memory.buffer import PageBuffer

    match os.environ["ABLATION"]:
        case "prefetch":
            AdapterStore.arrived = lambda self, ref, digests=None: None  # type: ignore[method-assign]
        case "overlap":
            PageBuffer.is_quiet = lambda self, span: False  # type: ignore[method-assign]
        case other:
            raise SystemExit(f"expected prefetch or overlap, got {other!r}")
