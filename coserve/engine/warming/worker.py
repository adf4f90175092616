"""A warm-up worker: loads the engine's base with few layers and random weights, and runs parts. `process` is its entry
point. The processes that compile its Triton kernels are forked from it, before it uses CUDA."""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from coserve.config import Config, config_from_json
from coserve.core.errors import ConfigError, CoserveError
from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.logs import set_up_logging
from coserve.core.processes import obey_parent, usable_cores
from coserve.engine.spatial.training_stream import sm_count_setter
from coserve.engine.warming.compilations import watch_compilations
from coserve.engine.warming.part_runner import PartRunner
from coserve.engine.warmup.parts import PartReport, WarmUpTask, gpu_of
from coserve.kernels.gpu.device import interpreted
from coserve.model.base import Base
from coserve.model.faults import out_of_memory
from coserve.model.load import load_base
from coserve.model.parallel.mesh import LoneRank

NICENESS = 5
"""Niceness of the compile processes, added to the worker's: they yield to it, because it finds the kernels to compile
next."""
MAX_PROCESSES = 16
"""Most processes of a worker: no part has enough kernels for more, and each takes some 100 MB."""
OOM_SCORE_ADJ = "1000"
"""OOM score: if the machine runs out of memory, Linux kills one of these processes rather than the engine."""

log = logging.getLogger(__name__)

THREADS = 1
MAX_REASON = 300
"""Most characters of a failure's reason: a report must fit its reader's buffer."""
TRAINING = ("training-", "blocks-")
"""Name prefixes of parts with training kernels."""


@contextmanager
def use_gpu(config: Config, number: int) -> Iterator[str]:
    """Context that makes a GPU current, and yields the base's device. Raises `ConfigError` if there are fewer GPUs."""
    if number == 0 or config.device == "cpu" or not torch.cuda.is_available():
        yield config.device
        return
    if (found := torch.cuda.device_count()) <= number:
        raise ConfigError(f"tp: expected a GPU for each of {config.tp} ranks, found {found}", field="tp")
    with torch.cuda.device(number):
        yield f"cuda:{number}"


def load_few_layers(config: Config, rank: int, device: str) -> Base:
    """Load the engine's base with few layers and random weights; with tensor parallelism a rank's shard of it, without
    the other ranks."""
    return load_base(
        config.model,
        device=device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        few_layers=True,
        mesh=LoneRank(rank, config.tp) if config.tp > 1 else None,
        strategy=config.lora_sharding,
        ep=config.ep,
        quantization=config.quantization,
        mla_cache=config.mla_cache,
    )


def work(sock: socket.socket) -> None:
    """Receive the `WarmUpTask`, then names of parts (`warmup.parts`); run each, and send `PartReport`s, until the other
    end closes."""
    channel = Channel[PartReport, WarmUpTask | str](sock, msgspec.msgpack.Decoder(WarmUpTask | str))
    with closing(channel), suppress(PeerLost):
        task = channel.receive()
        assert isinstance(task, WarmUpTask), "expected the task first"
        config = config_from_json(task.config.encode())
        set_up_logging("warm", config.logs)
        disable_progress_bar()
        torch.set_num_threads(THREADS)
        worker = _Worker(config, task, channel.send)
        try:
            while isinstance(part := channel.receive(), str):
                worker.run(part)
        finally:
            worker.close()


class _Worker:
    def __init__(self, config: Config, task: WarmUpTask, send: Callable[[PartReport], None]) -> None:
        self._config, self._task, self._send = config, task, send
        self._runners = dict[int, PartRunner]()
        """Runners by GPU number."""
        self._on_gpu = config.device != "cpu" and not interpreted()
        self._processes = start_compile_pool(task.workers) if self._on_gpu else None  # before CUDA is used
        self._compiled, self._progress = watch_compilations(), PartReport(0, 1)
        self._set_sm_count: Callable[[bool], None] = lambda trains: None

    def close(self) -> None:
        if self._processes is not None:
            self._processes.shutdown(cancel_futures=True)

    def run(self, part: str) -> None:
        """Run a part, and report its success or failure."""
        began, kernels, seconds = time.monotonic(), len(self._compiled.kernels), self._compiled.seconds
        self._progress = PartReport(0, 1)
        try:
            self._run(part)
        except BrokenProcessPool:  # most likely the machine ran out of memory; this worker is replaced
            self._send(PartReport(0, 1, "memory", "a process that compiles died"))
        except CoserveError as error:
            self._send(PartReport(0, 1, "unsupported", error.message[:MAX_REASON]))
        except Exception as error:  # noqa: BLE001 - any error fails the part alone
            reason = f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"
            self._send(PartReport(0, 1, "memory" if out_of_memory(error) else "error", reason[:MAX_REASON]))
        else:
            log.info(
                "%s: %.1f s, of which %d kernels took %.1f s to compile",
                part,
                time.monotonic() - began,
                len(self._compiled.kernels) - kernels,
                self._compiled.seconds - seconds,
            )
            self._send(PartReport(1, 1))

    def _run(self, part: str) -> None:
        gpu = gpu_of(part)
        with use_gpu(self._config, gpu) as device:
            if gpu not in self._runners:
                base = load_few_layers(self._config, gpu, device)
                self._runners[gpu] = PartRunner(base, self._config, self._task, self._processes, self._count)
                self._set_sm_count = sm_count_setter(self._config, base.device)
            self._set_sm_count(part.startswith(TRAINING))
            for done, total in self._runners[gpu].run(part):
                self._progress = PartReport(done, max(total, done + 1))
                self._send(self._progress)
            if self._on_gpu:
                log.info("%s: at most %.2f GiB", part, torch.cuda.max_memory_reserved() / (1 << 30))
                torch.cuda.empty_cache()  # otherwise a worker keeps its largest part's memory
                torch.cuda.reset_peak_memory_stats()

    def _count(self, name: str, seconds: float) -> None:
        """Record a kernel that a process has compiled."""
        self._compiled.add(name, seconds)
        self._send(self._progress)  # shows that the worker does not hang


def pool_size(workers: int, cores: int) -> int:
    """Processes of each worker: twice its fraction of the cores, as workers seldom keep all of theirs busy."""
    return max(1, min(MAX_PROCESSES, 2 * cores // workers))


def start_compile_pool(workers: int) -> ProcessPoolExecutor:
    """Fork the processes from this one, which must not have used CUDA yet. They end with it, even if it is killed.
    `workers`: number of warm-up workers."""
    # Numeric libraries handle fork for their threads themselves; Python 3.12 warns of any threads.
    warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
    processes, parent = pool_size(workers, usable_cores()), os.getpid()
    pool = ProcessPoolExecutor(processes, get_context("fork"), initializer=_initialize, initargs=(parent,))
    pool.submit(os.getpid).result()  # the first call forks all of them
    return pool


def _initialize(parent: int) -> None:
    obey_parent(parent)
    os.nice(NICENESS)
    with suppress(OSError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)
