"""One process of a warm-up: `python -m coserve.engine.warming.worker_process FD`, with the `WarmUpTask` as JSON on standard
input. FD is one end of a socket pair: the worker reads `DoPart` lines and writes `PartReport` lines."""

from __future__ import annotations

import os

from coserve.processes import obey_parent, skip_slow_imports

NICENESS = 10
"""The engine and the API process go first where there are too few processor cores."""


def main() -> None:
    obey_parent()
    os.nice(NICENESS)
    skip_slow_imports()
    from coserve.engine.warming.worker import work  # imports torch and transformers

    work()


if __name__ == "__main__":
    main()
