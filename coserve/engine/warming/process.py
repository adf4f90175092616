"""A warm-up worker's process: `python -m coserve.engine.warming.process FD`. FD is one end of a socket pair (see
`worker.work`)."""

from __future__ import annotations

import logging
import os
import socket
import sys

from coserve.core.processes import obey_parent
from coserve.engine.warming.fast_imports import fast_imports

NICENESS = 10
"""Niceness: the engine and the API process go first when cores are scarce."""

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes torch count GPUs by NVML if possible, so that imports that count them do not initialise CUDA before the
fork."""


def main() -> None:
    obey_parent()
    os.nice(NICENESS)
    os.environ.setdefault(NVML_CHECK, "1")
    with fast_imports():
        import torch._inductor.compile_fx  # noqa: F401 - before the fork

        from coserve.engine.warming.worker import work

    with socket.socket(fileno=int(sys.argv[1])) as sock:
        work(sock)
    logging.shutdown()
    os._exit(0)  # the interpreter's own cleanup takes seconds


if __name__ == "__main__":
    main()
