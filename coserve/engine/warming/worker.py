"""A worker of a warm-up: loads the engine's base with few layers and random weights, and runs parts. `worker_process` is the
process's entry."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from coserve.config import Config, config_from_json
from coserve.engine.spatial.training_stream import sm_count_setter
from coserve.engine.warming.compilations import watch_compilations
from coserve.engine.warming.compile_pool import start_compile_pool
from coserve.engine.warming.part_runner import PartRunner, make_part_runner
from coserve.errors import ConfigError, CoserveError
from coserve.kernels.gpu.device import interpreted
from coserve.logs.setup import LogSettings, set_up_logging
from coserve.model.base import Base, load_base
from coserve.model.faults import out_of_memory
from coserve.parallel.mesh import LoneRank
from coserve.warmup.messages import DoPart, PartReport, WarmUpTask
from coserve.warmup.parts import gpu_of

log = logging.getLogger(__name__)

THREADS = 1
MAX_REASON = 300
"""Characters of a failure's reason: a report must fit into the buffer of its reader."""
TRAINING = ("training-", "blocks-")
"""How the names of parts with training kernels begin."""


@contextmanager
def use_gpu(config: Config, number: int) -> Iterator[str]:
    """Makes a GPU the current one, and gives the base's device. Raises `ConfigError`: there are fewer."""
    if number == 0 or config.device == "cpu" or not torch.cuda.is_available():
        yield config.device
        return
    if (found := torch.cuda.device_count()) <= number:
        raise ConfigError(f"tp: expected a GPU for each of {config.tp} ranks, found {found}", field="tp")
    with torch.cuda.device(number):
        yield f"cuda:{number}"


def load_few_layers(config: Config, rank: int, device: str) -> Base:
    """The engine's base with few layers and random weights; under tensor parallelism a rank's part of it, without the other ranks."""
    return load_base(
        config.model,
        device=device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        few_layers=True,
        mesh=LoneRank(rank, config.tp) if config.tp > 1 else None,
        strategy=config.lora_sharding,
    )


def work(sock: socket.socket) -> None:
    """Run parts until the other end of the socket closes, whether it is read from or written to then."""
    with sock.makefile("rb") as lines, suppress(ConnectionError):
        if not (line := lines.readline()):
            return
        task = msgspec.json.decode(line, type=WarmUpTask)
        config = config_from_json(task.config.encode())
        set_up_logging("warm", LogSettings.of(config))
        disable_progress_bar()
        torch.set_num_threads(THREADS)
        runners = dict[int, PartRunner]()
        """By the number of the GPU."""
        set_sm_count: Callable[[bool], None] = lambda trains: None

        def send(report: PartReport) -> None:
            sock.sendall(msgspec.json.encode(report) + b"\n")

        compiled, progress = watch_compilations(), PartReport(0, 1)

        def count(name: str, seconds: float) -> None:
            compiled.add(name, seconds)
            send(progress)  # it is no process that hangs

        on_gpu = config.device != "cpu" and not interpreted()
        processes = start_compile_pool(task.workers) if on_gpu else None  # before CUDA is used
        for line in lines:
            name, began = msgspec.json.decode(line, type=DoPart).name, time.monotonic()
            kernels, seconds, progress = len(compiled.kernels), compiled.seconds, PartReport(0, 1)
            most = 0.0
            try:
                gpu = gpu_of(name)
                with use_gpu(config, gpu) as device:
                    if gpu not in runners:
                        base = load_few_layers(config, gpu, device)
                        runners[gpu] = make_part_runner(base, config, task, processes, count)
                        set_sm_count = sm_count_setter(config, base.device)
                    set_sm_count(name.startswith(TRAINING))
                    for done, total in runners[gpu].run(name):
                        progress = PartReport(done, max(total, done + 1))
                        send(progress)
                    if on_gpu:
                        most = torch.cuda.max_memory_reserved() / (1 << 30)
                        torch.cuda.empty_cache()  # else a worker keeps what its largest part took, beside the engine
                        torch.cuda.reset_peak_memory_stats()
            except BrokenProcessPool:  # it died, most likely as the machine ran out of memory; this worker is replaced
                send(PartReport(0, 1, "memory", "a process that compiles died"))
            except CoserveError as error:
                send(PartReport(0, 1, "unsupported", error.message[:MAX_REASON]))
            except Exception as error:  # noqa: BLE001 - any error fails the part alone
                reason = f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"
                send(PartReport(0, 1, "memory" if out_of_memory(error) else "error", reason[:MAX_REASON]))
            else:
                kernels, seconds = len(compiled.kernels) - kernels, compiled.seconds - seconds
                took = time.monotonic() - began
                log.info(
                    "%s: %.1f s, of which %d kernels took %.1f s to compile; at most %.2f GiB",
                    name,
                    took,
                    kernels,
                    seconds,
                    most,
                )
                send(PartReport(1, 1))
