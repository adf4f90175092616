"""A worker of the warm-up reports each part, and ends without a word once the process at the other end of its socket is
gone."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
import torch

from coserve.config import Config, config_to_json
from coserve.core.errors import UnsupportedBase
from coserve.core.link.channel import Channel, frame
from coserve.core.link.link import PeerLost
from coserve.engine.warming import worker
from coserve.engine.warmup.parts import PartReport, WarmUpTask


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker sets for its process is left as it is."""
    monkeypatch.setattr(worker, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(worker, "disable_progress_bar", lambda: None)
    monkeypatch.setattr(worker.torch, "set_num_threads", lambda _: None)


def open_worker(folder: Path) -> tuple[socket.socket, socket.socket]:
    """Both ends of a worker's socket; its task, and two parts that it cannot run, are sent."""
    ours, theirs = socket.socketpair()
    task = WarmUpTask(config_to_json(Config(device="cpu")).decode(), str(folder), {}, "shape", 1)
    for message in (task, "gpu0-nothing", "gpu0-nothing"):
        ours.sendall(frame(msgspec.msgpack.Encoder(), message))
    return ours, theirs


def reports(folder: Path) -> list[PartReport]:
    """What a worker sends of its two parts."""
    ours, theirs = open_worker(folder)
    ours.shutdown(socket.SHUT_WR)
    worker.work(theirs)
    found, channel = list[PartReport](), Channel[str, PartReport](ours, msgspec.msgpack.Decoder(PartReport))
    with closing(channel), suppress(PeerLost):
        while True:
            found.append(channel.receive())
    return found


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part raises `error`."""

    def run(name: str) -> int:
        raise error

    monkeypatch.setattr(worker, "gpu_of", run)


def test_a_part_that_cannot_be_run_is_reported(tmp_path: Path) -> None:
    assert [one.failure for one in reports(tmp_path)] == ["error", "error"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        MemoryError(),
        BrokenProcessPool("a process was killed"),
    ],
)
def test_a_part_without_memory_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_with(error, monkeypatch)
    assert [one.failure for one in reports(tmp_path)] == ["memory", "memory"]


@pytest.mark.parametrize("error", [ValueError("x" * 100_000), UnsupportedBase("x" * 100_000)])
def test_a_long_reason_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    fail_with(error, monkeypatch)
    assert [len(one.reason) < 2000 and "xxx" in one.reason for one in reports(tmp_path)] == [True, True]


def test_each_compiled_kernel_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps of a part may be done long before its last kernel is compiled."""

    class Runner:
        def __init__(self, compiled: Callable[[str, float], None]) -> None:
            self.compiled = compiled

        def run(self, name: str) -> Iterator[tuple[int, int]]:
            yield 2, 3
            self.compiled("shrink", 1.0)

    class Base:
        device = torch.device("cpu")

    monkeypatch.setattr(worker, "gpu_of", lambda name: 0)
    monkeypatch.setattr(worker, "load_few_layers", lambda *_: Base())
    monkeypatch.setattr(worker, "PartRunner", lambda *given: Runner(given[-1]))
    assert [(one.done, one.total) for one in reports(tmp_path)] == [(2, 3), (2, 3), (1, 1)] * 2


def test_a_report_that_nobody_reads_ends_the_worker(tmp_path: Path) -> None:
    ours, theirs = open_worker(tmp_path)
    ours.close()
    worker.work(theirs)


def test_an_end_that_closed_with_unread_reports_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = open_worker(tmp_path)

    def run(name: str) -> int:
        if ours.fileno() >= 0:
            theirs.sendall(b"unread\n")
            ours.close()
        raise ValueError(name)

    monkeypatch.setattr(worker, "gpu_of", run)
    worker.work(theirs)
