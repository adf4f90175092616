"""A worker of a warm-up: `python -m coserve.engine.warming.process FD`. FD is one end of a socket pair (see
`worker.work`)."""

from __future__ import annotations

import logging
import os
import socket
import sys

from coserve.core.processes import obey_parent
from coserve.engine.warming.fast_imports import fast_imports

NICENESS = 10
"""The engine and the API process go first where there are too few processor cores."""

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""torch then counts GPUs by NVML where it can: an import that asks for them does not initialise CUDA, before processes
are forked."""


def main() -> None:
    obey_parent()
    os.nice(NICENESS)
    os.environ.setdefault(NVML_CHECK, "1")
    with fast_imports():
        from coserve.engine.warming.worker import work

    with socket.socket(fileno=int(sys.argv[1])) as sock:
        work(sock)
    logging.shutdown()
    os._exit(0)  # what the interpreter would tidy up takes seconds


if __name__ == "__main__":
    main()
