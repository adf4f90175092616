"""A stream for training beside generation, on a part of the GPU that it has to itself (`--policy spatial`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from coserve.config import Config
from coserve.engine.spatial.slices_in_flight import Mark
from coserve.kernels.gpu.device import count_multiprocessors
from coserve.kernels.gpu.partition import part_sizes, split_multiprocessors


@dataclass(frozen=True)
class TrainingStream:
    """`enter` makes it the calling thread's current stream; `mark`: see `Mark`; `note`: for an operator."""

    enter: Callable[[], AbstractContextManager[object]]
    mark: Mark
    note: str


class StreamMarks:
    """Marks of a CUDA stream. A thread waits for them, one after another: nobody polls."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._thread = stream, ThreadPoolExecutor(1, "training-stream")

    def mark(self) -> Future[None]:
        """See `Mark`."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return self._thread.submit(event.synchronize)


def prepare_environment(config: Config) -> None:
    """Before CUDA is used. By default streams share eight connections to the GPU; in one connection, kernels of one stream wait for
    those of another."""
    if config.policy == "spatial":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def make_training_stream(config: Config, device: torch.device) -> TrainingStream | None:
    """None: the policy takes turns. Otherwise the GPU is split, and generation's stream is the calling thread's current one from now
    on. Between loading the base and anything else. Raises `StartupError` where the GPU cannot be split."""
    if config.policy != "spatial":
        return None
    partition = split_multiprocessors(device, config.training_sm_share)
    torch.cuda.synchronize(device)  # the weights were loaded on another stream
    torch.cuda.set_stream(partition.generation.stream)
    stream = partition.training.stream
    return TrainingStream(lambda: torch.cuda.stream(stream), StreamMarks(stream).mark, partition.note)


def count_as_the_engine(config: Config, device: torch.device) -> Callable[[bool], None]:
    """For a process that compiles kernels ahead: call the result with whether they are training's, and launches count the
    multiprocessors that they will have in the engine."""
    if config.policy != "spatial" or device.type != "cuda":
        return lambda trains: None
    training, generation = part_sizes(device, config.training_sm_share)
    return lambda trains: count_multiprocessors(training if trains else generation)
