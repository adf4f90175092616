"""Work outside of slices that fails on one of two ranks: both have the same error, neither waits, and they go on
together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from coserve.core.cancellation import Cancellation
from coserve.core.errors import EngineFault, JobOutOfMemory, UnsupportedBase
from coserve.finetune.host_copy import HostCopy
from coserve.finetune.memory_profiling import Conditions, MemoryProfiler, NoMeter
from coserve.generate.execution.start import check_compiled
from coserve.memory.plan import Work
from coserve.model.agreement import FailedTogether, on_all_ranks
from coserve.model.faults import out_of_memory as lacks_memory
from coserve.model.fused import FusedBase
from coserve.model.layers import LayerCut
from coserve.model.parallel.adapter import AdapterPartition
from coserve.model.parallel.mesh import Mesh
from coserve.model.probe import compare
from coserve.model.training import compiled_layers
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.finetuning import Bench, job_spec, random_corpus
from tests.support.interpreted import interpreted
from tests.support.lora_backends import GROUPED
from tests.support.memory_faults import Faults, Point, out_of_memory_at
from tests.support.ranks import Ranks
from tests.support.sharded import load, save_base

CPU = torch.device("cpu")
JOB: dict[str, object] = {"steps": 2, "checkpoint_steps": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_base(tmp_path_factory.mktemp("base"))


def fails_on(
    mesh: Mesh, rank: int, points: tuple[Point, ...], *calls: int, error: Callable[[], BaseException] | None = None
) -> AbstractContextManager[Faults | None]:
    """These calls of the points raise on this rank."""
    if mesh.rank != rank:
        return nullcontext()
    if error is None:
        return out_of_memory_at(points, lambda call: call in calls)
    return out_of_memory_at(points, lambda call: call in calls, error=error)


def together(mesh: Mesh) -> bool:
    """Whether a collective gives every rank the same."""
    return mesh.all_reduce(torch.ones(3)).tolist() == [float(mesh.size)] * 3


def _works(mesh: Mesh, what: str) -> tuple[str, bool, bool]:
    """What work with two collectives raises where rank 1 fails between them; whether for lack of memory; whether ranks
    are together."""

    def work() -> None:
        mesh.all_reduce(torch.ones(5))
        if mesh.rank == 1:
            raise {
                "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
                "unsupported": UnsupportedBase("its layers differ"),
                "long": ValueError('"ü\n' * 1000),
            }[what]
        mesh.all_gather(torch.ones(7))

    with pytest.raises(FailedTogether) as raised:
        on_all_ranks(mesh, CPU, work)
    return str(raised.value), lacks_memory(raised.value), together(mesh)


@pytest.mark.parametrize(
    ("what", "begins"),
    [
        ("memory", "not enough memory (rank 1: needed 2.00 GiB, free "),
        ("unsupported", "rank 1: its layers differ"),
        ("long", 'rank 1: ValueError: "ü\n"ü\n'),
    ],
)
def test_an_error_of_one_rank_is_that_of_all(two: Ranks, what: str, begins: str) -> None:
    own, other = two.run(_works, what)
    assert own == other
    message, memory, same = own
    assert message.startswith(begins)
    assert memory == (what == "memory")
    assert same


def _layers(mesh: Mesh, folder: str, point: str, call: int) -> str:
    """Why there are no layers to compile where memory runs out on rank 1."""
    loaded = load(folder, mesh)
    points: dict[str, Point] = {
        "cut": (LayerCut, "layer"),
        "embed": (LayerCut, "embed"),
        "trace": (compiled_layers, "trace_layer"),
        "compile": (torch.linalg, "vector_norm"),
    }
    with fails_on(mesh, 1, (points[point],), call), pytest.raises(FailedTogether) as raised:
        cut = on_all_ranks(mesh, CPU, lambda: LayerCut(loaded))
        CompiledLayers(loaded, cut, interpreted).compile()
    assert lacks_memory(raised.value)
    assert together(mesh)
    return str(raised.value)


@pytest.mark.parametrize(("point", "call"), [("cut", 1), ("embed", 0), ("embed", 2), ("trace", 0), ("compile", 0)])
def test_no_rank_has_compiled_layers_where_one_has_no_memory_for_them(
    two: Ranks, base: str, point: str, call: int
) -> None:
    own, other = two.run(_layers, base, point, call)
    assert own == other
    assert own.startswith("not enough memory (rank 1: needed 2.00 GiB, free ")


def _steps(mesh: Mesh, folder: str, point: str) -> str:
    """The note on compiled steps where rank 1 cannot compile them."""
    loaded = load(folder, mesh)
    fused = FusedBase(loaded, compiled=False)
    error = (lambda: RuntimeError("no compiler")) if point == "check_equal" else None
    points: dict[str, Point] = {"check_equal": (compare, "check_equal"), "attend": (torch.ops.coserve, "attend")}
    with fails_on(mesh, 1, (points[point],), 1, error=error):
        note = check_compiled(fused)
    assert together(mesh)
    return note


@pytest.mark.parametrize(("point", "why"), [("check_equal", "rank 1: RuntimeError: no compiler"), ("attend", "memory")])
def test_no_rank_runs_compiled_steps_where_one_cannot_compile_them(two: Ranks, base: str, point: str, why: str) -> None:
    own, other = two.run(_steps, base, point)
    assert own == other
    assert why in own


def _gathers(mesh: Mesh, folder: str, root: str, rank: int, point: str) -> list[str]:
    """What a checkpoint raises for which `rank` finds no memory, then the files of the next job's."""
    loaded = load(folder, mesh)
    bench, leads = Bench(loaded, Path(root)), mesh.rank == 0
    trainer, corpus = bench.trainer, random_corpus()
    points: dict[str, Point] = {"gather": (AdapterPartition, "gather"), "download": (HostCopy, "download")}
    raised = list[str]()
    for job in ("first", "second"):
        trainer.load(job_spec(corpus, job, **JOB), Cancellation())()
        while not trainer.checkpoint_due(job):
            trainer.advance(job, None)
        with fails_on(mesh, rank, (points[point],) if job == "first" else (), 0):
            try:
                found = trainer.checkpoint(job)
                if found is not None and leads:
                    found()
            except JobOutOfMemory as error:
                raised.append(f"{type(error).__name__}: {error}")
        trainer.drop(job)
    assert together(mesh)
    return raised


@pytest.mark.parametrize(("rank", "point"), [(0, "gather"), (1, "gather"), (1, "download")])
def test_a_checkpoint_that_one_rank_has_no_memory_for_is_given_up_by_all(
    two: Ranks, base: str, tmp_path: Path, rank: int, point: str
) -> None:
    bench, corpus = Bench(load(base), tmp_path), random_corpus()
    for job in ("first", "second"):
        bench.place(corpus, job_spec(corpus, job, **JOB))
    (own,), (other,) = two.run(_gathers, base, str(tmp_path), rank, point)
    assert own.startswith(f"JobOutOfMemory: not enough memory (rank {rank}: needed 2.00 GiB, free ")
    assert other.startswith("JobOutOfMemory: not enough memory (")
    assert not bench.folder.checkpoints("first")
    assert bench.folder.checkpoints("second")


def _profile(mesh: Mesh, folder: str) -> tuple[object, bool]:
    work = Work(step_tokens=32, micro_batch_tokens=64, jobs=1)
    conditions = Conditions(GROUPED, recompute=False, max_running=2, page_tokens=16, work=work)
    profiler = MemoryProfiler(load(folder, mesh), NoMeter(), conditions, rank=4)
    with fails_on(mesh, 1, ((LayerCut, "layer"),), 1):
        profiler.costs(64)
    return dict(mesh.traffic.bytes), together(mesh)


@pytest.mark.slow
def test_ranks_measure_smaller_batches_where_one_has_no_memory(two: Ranks, base: str) -> None:
    (sent, same), other = two.run(_profile, base)
    assert same
    assert (sent, same) == other, "of batches of one size"


def _faulty(mesh: Mesh) -> None:
    def work() -> None:
        raise EngineFault("the GPU does not work any more")

    with pytest.raises(EngineFault, match="GPU"):
        on_all_ranks(mesh, CPU, work)


def test_a_device_that_has_failed_is_no_error_of_the_work(two: Ranks) -> None:
    two.run(_faulty)
