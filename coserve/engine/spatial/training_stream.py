"""A CUDA stream for training that runs concurrently with generation: on its own multiprocessors (`--policy spatial`),
or on all of them with low priority (`overlap`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from coserve.config import Config
from coserve.core.errors import StartupError
from coserve.engine.spatial.slices_in_flight import Marks
from coserve.kernels.gpu.device import count_multiprocessors
from coserve.kernels.gpu.partition import part_sizes, split_multiprocessors

TRAINING, GENERATION = -1, -5
"""Stream priorities: a lower number is a higher priority, 0 the lowest; torch uses the nearest available. Training does
not get the lowest, because copies of jobs have it, and torch hands out its 32 streams of a priority in rotation."""


@dataclass(frozen=True)
class TrainingStream:
    """Training's stream. `enter` makes it the calling thread's current stream; `marks`: how its slices and the steps
    beside them signal their ends; `note`: for the operator; `captures`: a stream with the same multiprocessors and
    priority for CUDA graph captures, because other threads load jobs on the first one."""

    enter: Callable[[], AbstractContextManager[object]]
    marks: Marks
    note: str
    captures: torch.cuda.Stream | None = None


class StreamMarks:
    """Marks of a CUDA stream. A thread waits for them one after another, without polling."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._thread = stream, ThreadPoolExecutor(1, "training-stream")

    def mark(self) -> Future[None]:
        """See `Mark`."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return self._thread.submit(event.synchronize)


def prepare_environment(config: Config) -> None:
    """Set CUDA's environment; call it before CUDA is used. By default streams share eight connections to the GPU, and
    kernels of different streams on one connection wait for each other."""
    if config.trains_concurrently:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def make_training_stream(config: Config, device: torch.device) -> TrainingStream | None:
    """Make training's stream, and make generation's stream current; None if the policy alternates on one stream. Call
    it after loading the base and before anything else. Raises `StartupError` if the GPU cannot be shared in this
    way."""
    if not config.trains_concurrently:
        return None
    if config.policy_class.stream == "priority":
        training, generation = priority_streams(device)
        made = stream_of_low_priority(training, generation)
    else:
        partition = split_multiprocessors(device, config.training_sm_share)
        generation, own = partition.generation.stream, partition.training.stream
        marks, captures = Marks(StreamMarks(own).mark), partition.training.captures
        made = TrainingStream(lambda: torch.cuda.stream(own), marks, partition.note, captures)
    torch.cuda.synchronize(device)  # the weights were loaded on another stream
    torch.cuda.set_stream(generation)
    return made


def stream_of_low_priority(training: torch.cuda.Stream, generation: torch.cuda.Stream) -> TrainingStream:
    """Use `training` for slices, overlapped with steps on `generation`. Events mark the ends of both."""

    @contextmanager
    def between() -> Iterator[None]:
        generation.wait_stream(training)
        yield
        training.wait_stream(generation)

    return TrainingStream(
        enter=lambda: torch.cuda.stream(training),
        marks=Marks(StreamMarks(training).mark, between, StreamMarks(generation).mark),
        note="overlap: training and generation share all multiprocessors, and generation's kernels go first",
        captures=torch.cuda.Stream(training.device, priority=training.priority),  # type: ignore[no-untyped-call]
    )


def priority_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return training's and generation's streams. When blocks of both wait for a multiprocessor, generation's go first
    (CUDA C++ Programming Guide, "Stream Priorities"). Raises `StartupError` for a device without priorities."""
    if device.type != "cuda":
        raise StartupError(f"policy: 'overlap' needs an NVIDIA GPU, and the base is on {device.type}")
    training, generation = (torch.cuda.Stream(device, priority=each) for each in (TRAINING, GENERATION))  # type: ignore[no-untyped-call]
    if not generation.priority < training.priority < 0:
        found = f"training's is {training.priority}, generation's {generation.priority}"
        raise StartupError(f"policy: 'overlap' needs three priorities of streams, and on this GPU {found}")
    return training, generation


def sm_count_setter(config: Config, device: torch.device) -> Callable[[bool], None]:
    """Return a function that sets the SM count for kernel selection, for a process that compiles kernels ahead of the
    engine. With `policy=spatial`, training and generation each have some of the GPU's SMs. Call it with True before
    compiling training kernels, with False before compiling generation kernels."""
    if config.policy_class.stream != "partition" or device.type != "cuda":
        return lambda trains: None
    training, generation = part_sizes(device, config.training_sm_share)
    return lambda trains: count_multiprocessors(training if trains else generation)
