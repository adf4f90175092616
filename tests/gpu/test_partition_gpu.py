"""Two parts of one GPU: which multiprocessors kernels and graphs run on, that both parts work at the same time, and an
engine over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from coserve.engine.spatial.slices_in_flight import Marks
from coserve.engine.spatial.training_stream import StreamMarks, TrainingStream
from coserve.generate.execution.graphs.shared import make_graph_pool
from coserve.kernels.gpu.capture import captured
from coserve.kernels.gpu.device import device_info, forget_counts
from coserve.kernels.gpu.partition import Partition, part_sizes, split_multiprocessors
from tests.support.served_beside import served

pytestmark = pytest.mark.gpu

PROGRAMS, SPINS = 4096, 200
BOUND = 5_000_000
"""Of a wait on the device: some seconds."""


@triton.jit
def _note(out_ptr, scratch_ptr, spins):
    """Each program notes the multiprocessor that it runs on, after some work: so that all that may be used are."""
    number = tl.program_id(0)
    for _ in range(spins):
        tl.atomic_add(scratch_ptr + number, 1)
    found = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out_ptr + number, found)


@triton.jit
def _await(flag_ptr, seen_ptr, spins):
    """Waits until the flag is raised; notes whether it was."""
    seen, turns = 0, 0
    while (seen == 0) & (turns < spins):
        seen = tl.atomic_add(flag_ptr, 0)
        turns += 1
    tl.store(seen_ptr, seen)


@triton.jit
def _raise(flag_ptr):
    tl.atomic_xchg(flag_ptr, 1)


def noted() -> Tensor:
    out, scratch = (torch.full((PROGRAMS,), -1, dtype=torch.int32, device="cuda") for _ in range(2))
    _note[(PROGRAMS,)](out, scratch, SPINS)
    return out


def used(out: Tensor) -> set[int]:
    torch.cuda.synchronize()
    return set(out.tolist())


@pytest.fixture(scope="module")
def partition() -> Iterator[Partition]:
    found = split_multiprocessors(torch.device("cuda", 0), 0.5)
    torch.cuda.synchronize()
    yield found
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.default_stream())
    forget_counts()


def test_kernels_of_the_parts_run_on_disjoint_multiprocessors(partition: Partition) -> None:
    outs = []
    for part in (partition.training, partition.generation):
        with torch.cuda.stream(part.stream):
            outs.append(noted())
    training, generation = map(used, outs)
    assert not training & generation
    assert len(training) == partition.training.multiprocessors
    assert len(generation) == partition.generation.multiprocessors
    total = torch.cuda.get_device_properties(0).multi_processor_count
    assert len(training | generation) == total


def test_launches_count_the_multiprocessors_of_their_part(partition: Partition) -> None:
    device = torch.device("cuda", 0)
    assert part_sizes(device, 0.5) == (partition.training.multiprocessors, partition.generation.multiprocessors)
    for part in (partition.training, partition.generation):
        with torch.cuda.stream(part.stream):
            assert device_info(device).multiprocessors == part.multiprocessors
    assert device_info(device).multiprocessors == partition.generation.multiprocessors


def test_a_graph_runs_where_it_was_captured(partition: Partition) -> None:
    with torch.cuda.stream(partition.generation.stream):
        noted()  # compiled
        pool = make_graph_pool(torch.device("cuda", 0))
        assert pool is not None
        graph = torch.cuda.CUDAGraph()
        with captured(graph, pool.memory, pool.stream):
            out = noted()
        graph.replay()
        partition.generation.stream.synchronize()
        found = set(out.tolist())
    with torch.cuda.stream(partition.training.stream):
        others = used(noted())
    assert -1 not in found and 0 < len(found) <= partition.generation.multiprocessors, sorted(found)
    assert not found & others, (sorted(found), sorted(others))


def test_both_parts_work_at_the_same_time(partition: Partition) -> None:
    """A kernel of each part sees what a later one of the other part does: neither waits for the other's end."""
    flag, seen = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    _await[(1,)](flag, seen, 0)
    _raise[(1,)](flag)
    for waits, raises in (
        (partition.training, partition.generation),
        (partition.generation, partition.training),
    ):
        flag.zero_()
        seen.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(waits.stream):
            _await[(1,)](flag, seen, BOUND)
        with torch.cuda.stream(raises.stream):
            _raise[(1,)](flag)
        torch.cuda.synchronize()
        assert seen.item() == 1


def test_a_mark_is_done_when_the_streams_work_is(partition: Partition) -> None:
    flag, seen = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    _await[(1,)](flag, seen, 0)
    _raise[(1,)](flag)
    flag.zero_()
    torch.cuda.synchronize()
    marks = StreamMarks(partition.training.stream)
    with torch.cuda.stream(partition.training.stream):
        _await[(1,)](flag, seen, BOUND)
    mark = marks.mark()
    assert not mark.done()
    with torch.cuda.stream(partition.generation.stream):
        _raise[(1,)](flag)
    mark.result(60)
    with torch.cuda.stream(partition.training.stream):
        assert seen.item() == 1


def test_memory_moves_between_the_parts_as_between_streams(partition: Partition) -> None:
    training, generation = partition.training.stream, partition.generation.stream
    with torch.cuda.stream(training):
        x = torch.randn(512, 512, device="cuda")
        y = x @ x
    generation.wait_stream(training)
    with torch.cuda.stream(generation):
        again = x @ x
    torch.cuda.synchronize()
    torch.testing.assert_close(again, y)


async def test_an_engine_over_the_parts_gives_what_one_that_takes_turns_gives(
    partition: Partition, tmp_path: Path
) -> None:
    """In the same process, as a GPU is split once: `make_training_stream` does what is done here."""
    alone = await served(tmp_path / "turns", None, policy="slack")
    torch.cuda.synchronize()
    torch.cuda.set_stream(partition.generation.stream)
    stream = partition.training.stream
    try:
        both = await served(
            tmp_path / "spatial",
            TrainingStream(lambda: torch.cuda.stream(stream), Marks(StreamMarks(stream).mark), partition.note),
            policy="spatial",
        )
    finally:
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())
    assert both[0] == alone[0]
    for name in ("loss", "valid_loss", "grad_norm"):
        assert both[1][name] == pytest.approx(alone[1][name], rel=1e-3)
