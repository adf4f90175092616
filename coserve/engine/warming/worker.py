"""One process of a warm-up: `python -m coserve.engine.warming.worker FD`, with the `Task` as JSON on standard input.

It builds the engine's base with few layers and random weights, and runs the parts that it is asked for over it: `DoPart` lines
come in through FD, `PartReport` lines go out.
"""

from __future__ import annotations

import logging
import socket
import sys
import time

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from coserve.config import config_from_json
from coserve.engine.warming.compilations import measure_compilations
from coserve.engine.warming.runs import Runs, make_runs
from coserve.errors import CoserveError
from coserve.logs.setup import LogSettings, set_up_logging
from coserve.model.base import load_base
from coserve.processes import obey_parent
from coserve.warmup.messages import DoPart, PartReport, Task

log = logging.getLogger(__name__)

THREADS = 1


def main() -> None:
    obey_parent()
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    config = config_from_json(task.config.encode())
    set_up_logging("warm", LogSettings.of(config))
    disable_progress_bar()
    torch.set_num_threads(THREADS)
    runs: Runs | None = None
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rwb") as lines:

        def tell(report: PartReport) -> None:
            lines.write(msgspec.json.encode(report) + b"\n")
            lines.flush()

        spent = measure_compilations()
        for line in lines:
            name, began, before = (
                msgspec.json.decode(line, type=DoPart).name,
                time.monotonic(),
                (spent.kernels, spent.seconds),
            )
            try:
                if runs is None:
                    base = load_base(
                        config.model,
                        device=config.device,
                        dtype=config.dtype,
                        trust_remote_code=config.trust_remote_code,
                        few_layers=True,
                    )
                    runs = make_runs(base, config, task)
                for done, total in runs.part(name):
                    tell(PartReport(done, max(total, done + 1)))
            except torch.OutOfMemoryError as error:
                tell(PartReport(0, 1, "memory", str(error).splitlines()[0]))
            except CoserveError as error:
                tell(PartReport(0, 1, "unsupported", error.message))
            except Exception as error:  # noqa: BLE001 - whatever it is, the part has failed
                tell(PartReport(0, 1, "error", f"{type(error).__name__}: {str(error).splitlines()[:1]}"))
            else:
                took, (kernels, seconds) = time.monotonic() - began, before
                kernels, seconds = spent.kernels - kernels, spent.seconds - seconds
                log.info("%s: %.1f s, of which %d kernels took %.1f s to compile", name, took, kernels, seconds)
                tell(PartReport(1, 1))


if __name__ == "__main__":
    main()
