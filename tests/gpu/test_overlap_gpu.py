"""Training on a stream of low priority: generation's kernels go first, turns without the host, and an engine over both
streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.config import Config
from coserve.engine.spatial.training_stream import (
    StreamMarks,
    TrainingStream,
    make_training_stream,
    priority_streams,
    stream_of_low_priority,
)
from coserve.generate.execution.graphs.shared import make_graph_pool
from coserve.kernels.gpu.capture import captured
from tests.support.crash_oracle import job_request
from tests.support.daemon_process import DaemonProcess
from tests.support.served_beside import served

pytestmark = pytest.mark.gpu

SIZE, PRODUCTS = 8192, 200
"""Of a product of matrices, which takes milliseconds, and how many are queued."""
Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]


@pytest.fixture
def streams() -> Iterator[Streams]:
    yield priority_streams(torch.device("cuda", 0))
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.default_stream())


def matrices() -> tuple[Tensor, Tensor, Tensor]:
    large = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    small = torch.ones(64, 64, device="cuda")
    large @ large, small @ small
    return large, torch.empty_like(large), small


def occupy(training: torch.cuda.Stream, large: Tensor, out: Tensor) -> None:
    with torch.cuda.stream(training):
        for _ in range(PRODUCTS):
            torch.mm(large, large, out=out)


def test_streams_have_different_priorities(streams: Streams) -> None:
    training, generation = streams
    assert generation.priority < training.priority < torch.cuda.default_stream().priority


def test_generation_does_not_wait_for_training_that_is_queued(streams: Streams) -> None:
    """Also a graph: it keeps the priority of the stream that it was captured on."""
    training, generation = streams
    large, out, small = matrices()
    with torch.cuda.stream(generation):
        small @ small
        pool = make_graph_pool(torch.device("cuda", 0))
        assert pool is not None and pool.stream == generation
        graph = torch.cuda.CUDAGraph()
        with captured(graph, pool.memory, pool.stream):
            for _ in range(20):
                result = small @ small
    torch.cuda.synchronize()
    occupy(training, large, out)
    queued = StreamMarks(training).mark()
    with torch.cuda.stream(generation):
        graph.replay()
    StreamMarks(generation).mark().result(60)
    assert not queued.done(), "the slices should take longer"
    queued.result(60)
    torch.testing.assert_close(result, small @ small)


def test_between_slices_a_step_sees_the_one_before_and_not_the_one_after(streams: Streams) -> None:
    training, generation = streams
    large, out, _ = matrices()
    written, seen = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_stream(generation)
    made = stream_of_low_priority(training, generation)
    marks = made.marks
    for number in range(1, 6):
        occupy(training, large, out)
        with made.enter():
            written.fill_(number)
        with marks.between():
            seen.copy_(written)
        with made.enter():
            written.fill_(-1)
        assert marks.steps is not None
        marks.steps().result(60)
        assert seen.item() == number


def test_auto_is_overlap(tmp_path: Path) -> None:
    options = ("--device", "cuda", "--policy", "auto", "--compile", "off", "--kv-tokens", "16384")
    with DaemonProcess(Path("bundled"), tmp_path / "data", options=options) as daemon:
        daemon.wait_ready()
        _, job = daemon.call("POST", "/finetune", job_request("learned"))
        assert [*daemon.events("GET", f"/finetune/{job['id']}/events")][-1]["state"] == "succeeded"
        assert "overlap: training and generation share" in str(daemon.call("GET", "/health")[1]["notes"])
        assert daemon.stop() == 0


@pytest.mark.parametrize("steps", ["beside", "between"])
async def test_an_engine_gives_what_one_that_takes_turns_gives(steps: str, tmp_path: Path) -> None:
    alone = await served(tmp_path / "turns", None, policy="slack")
    torch.cuda.synchronize()
    try:
        stream = make_training_stream(Config(policy="overlap"), torch.device("cuda", 0))
        assert isinstance(stream, TrainingStream)
        both = await served(tmp_path / "overlap", stream, policy="overlap", overlap_steps=steps)
    finally:
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())
    assert both[0] == alone[0]
    for name in ("loss", "valid_loss", "grad_norm"):
        assert both[1][name] == pytest.approx(alone[1][name], rel=1e-3)
