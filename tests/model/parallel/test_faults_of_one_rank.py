"""An error of one rank in a slice of a job: all ranks leave the slice, and go on together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from coserve.core.cancellation import Cancellation
from coserve.core.errors import JobOutOfMemory
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.layers.eager import EagerLayerPass
from coserve.finetune.layers.graphs import LayerGraphs
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.passes import training_pass
from coserve.finetune.sessions.trainee import CAPTURE_FAILED, Outcome, Verdict, how_to_retry, judge
from coserve.model.layers import LayerCut
from coserve.model.parallel.mesh import Mesh
from coserve.model.training.compiled_layers import CompiledLayers, CompiledPass
from coserve.model.training.running_pass import RunningPass
from tests.support.examples import marks_on_days, on_days
from tests.support.finetuning import Bench, job_spec, random_corpus
from tests.support.interpreted import interpreted
from tests.support.layer_graphs import RepeatingRecorder
from tests.support.lora_backends import GROUPED, SEGMENTED
from tests.support.memory_faults import Point, out_of_memory, out_of_memory_at
from tests.support.ranks import Ranks
from tests.support.sharded import load, save_base

POINTS: dict[str, tuple[Point, ...]] = {
    "anywhere": ((training_pass, "pack_jobs"), (LayerCut, "layer"), (LayerCut, "head"), (torch.autograd, "grad")),
    "update": ((AdapterOptimizer, "slices"),),
    "compiled": (
        (CompiledPass, "forward"),
        (RunningPass, "attend"),
        (RunningPass, "summed"),
        (RunningPass, "learn_backward"),
        (RunningPass, "attend_backward"),
    ),
    "after a forward": ((EagerLayerPass, "forward"),),
    "after a backward": ((EagerLayerPass, "backward"),),
}
CAPTURES = {"capture": RuntimeError("no capture"), "memory of a capture": torch.OutOfMemoryError("CUDA out of memory.")}
"""What recordings of graphs raise."""
SIZE = 2


def _once_others_ended() -> BaseException:
    """An error that comes when the other rank has ended the slice: none of its collectives is left."""
    time.sleep(0.3)
    return out_of_memory()


class Trained(NamedTuple):
    losses: list[float]
    verdicts: list[Verdict]
    calls: int
    """Of the points, on the rank that fails."""
    together: bool
    """Whether a collective after it all gives every rank the same."""
    notes: tuple[str, ...]
    """Of the trainer, at the end."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_base(tmp_path_factory.mktemp("base"))


def _corpus(points: str) -> Corpus:
    """For graphs of batches that are alike."""
    return random_corpus(lengths=(8,) * 10 if points in CAPTURES else (9, 5, 12, 3, 7, 8, 6, 11))


def _train(mesh: Mesh, base: str, root: str, points: str, fails: tuple[int, ...], at: int) -> Trained:
    """Slices of a job as `RankedTrainer` and followers run them; what the points of rank 1 raise at calls `fails`."""
    loaded, layers, lora_backend = load(base, mesh), None, GROUPED
    if points in ("compiled", *CAPTURES):
        layers, lora_backend = CompiledLayers(loaded, LayerCut(loaded), interpreted), SEGMENTED
        layers.compile()
    own_captures = fails if points in CAPTURES and mesh.rank == at else ()
    graphs = None
    if layers is not None and points in CAPTURES:
        recorder = RepeatingRecorder(lambda number: CAPTURES[points] if number in own_captures else None)
        graphs = LayerGraphs(layers, lambda: recorder, least_step=8, ranks=True)
    bench = Bench(loaded, Path(root), compiled=layers, graphs=graphs, lora_backend=lora_backend)
    corpus = _corpus(points)
    few = ("q_proj", "down_proj")  # each kernel takes its time in Triton's interpreter
    size = {"steps": 4, "r": 16, "targets": few} if graphs else {"steps": 2 if points == "compiled" else 3}
    spec = job_spec(corpus, validation_split=0.3, eval_steps=2, bd_blocks=2, **size)
    trainer = bench.trainer
    trainer.load(spec, Cancellation())()
    losses, verdicts = list[float](), list[Verdict]()
    late = points.startswith("after")
    error = _once_others_ended if late else out_of_memory
    own_points = POINTS.get(points, ()) if mesh.rank == at else ()
    with out_of_memory_at(own_points, lambda call: call in fails, after=late, error=error) as faults:
        while not trainer.finished(spec.id):
            own = trainer.attempt(spec.id, 2)
            everyone: list[Outcome] = [own] * SIZE
            dist.all_gather_object(everyone, own)
            verdict = judge(everyone)
            if verdict.code:
                verdicts.append(verdict)
            if verdict.retry:
                held = [False] * SIZE
                dist.all_gather_object(held, trainer.has_graphs)
                how = how_to_retry(verdict, graphs=held[0])
                if trainer.retry(spec.id, how) or not how.lower:
                    continue
            if verdict.code:
                break
            losses += [] if own.metrics is None else [own.metrics.loss]
    trainer.drop(spec.id)
    same = mesh.all_reduce(torch.ones(3)).tolist() == [float(SIZE)] * 3
    return Trained(losses, verdicts, faults.calls, same, trainer.notes)


def train(ranks: Ranks, base: str, root: Path, points: str, *fails: int, at: int = 1) -> Trained:
    """On both ranks, which come to the same end."""
    corpus = _corpus(points)
    bench = Bench(load(base), root)
    bench.place(corpus, job_spec(corpus))
    found = ranks.run(_train, base, str(root), points, fails, at)
    assert [one.losses for one in found] == [found[0].losses] * SIZE
    assert [one.verdicts for one in found] == [found[0].verdicts] * SIZE
    assert [one.notes for one in found] == [found[0].notes] * SIZE, "graphs are off on all ranks, or on none"
    assert all(one.together for one in found)
    result: Trained = found[at]
    return result


@on_days(2)
def test_memory_that_runs_out_on_one_rank_anywhere_changes_nothing_but_rounding(
    two: Ranks, base: str, tmp_path: Path
) -> None:
    (tmp_path / "clean").mkdir()
    expected = train(two, base, tmp_path / "clean", "anywhere")
    assert not expected.verdicts
    for number, call in enumerate({0, 1, *range(2, expected.calls, max(1, expected.calls // 6))}):
        root = tmp_path / str(number)
        root.mkdir()
        found = train(two, base, root, "anywhere", call, at=number % SIZE)
        assert [(one.code, one.retry) for one in found.verdicts] == [(JobOutOfMemory.code, True)], call
        assert found.losses == pytest.approx(expected.losses, rel=1e-4), call


@on_days(2)
def test_memory_that_runs_out_on_one_rank_in_compiled_layers(two: Ranks, base: str, tmp_path: Path) -> None:
    """Between two collectives of a layer, too."""
    (tmp_path / "clean").mkdir()
    expected = train(two, base, tmp_path / "clean", "compiled")
    assert not expected.verdicts
    for call in (1, 16, 33):  # ahead of attention, ahead of a sum, and in a backward
        assert call < expected.calls
        (root := tmp_path / str(call)).mkdir()
        found = train(two, base, root, "compiled", call, at=call % SIZE)
        assert [(one.code, one.retry) for one in found.verdicts] == [(JobOutOfMemory.code, True)], call
        assert found.losses == pytest.approx(expected.losses, rel=1e-4), call


@pytest.mark.parametrize(("point", "call"), [("after a forward", 0), ("after a backward", 1)])
def test_memory_that_runs_out_once_the_other_rank_ended_its_slice(
    two: Ranks, base: str, tmp_path: Path, point: str, call: int
) -> None:
    """Both begin the optimizer step again: one within a micro-batch, or at its end."""
    for name in ("clean", "late"):
        (tmp_path / name).mkdir()
    expected = train(two, base, tmp_path / "clean", point)
    found = train(two, base, tmp_path / "late", point, call)
    assert [(one.code, one.retry) for one in found.verdicts] == [(JobOutOfMemory.code, True)]
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


def test_a_job_that_never_fits_on_one_rank_ends_alone(two: Ranks, base: str, tmp_path: Path) -> None:
    found = train(two, base, tmp_path, "anywhere", *range(1000))
    assert found.losses == []
    assert len(found.verdicts) > 1
    assert found.verdicts[-1].code == JobOutOfMemory.code


def test_an_update_that_fails_on_one_rank_ends_the_job(two: Ranks, base: str, tmp_path: Path) -> None:
    """The other rank has changed its weights."""
    found = train(two, base, tmp_path, "update", 1)
    assert len(found.losses) == 1
    assert [(one.code, one.retry) for one in found.verdicts] == [(JobOutOfMemory.code, False)]


@pytest.mark.parametrize(
    ("points", "code"),
    [
        pytest.param("capture", CAPTURE_FAILED, marks=marks_on_days(0, 2)),
        pytest.param("memory of a capture", JobOutOfMemory.code, marks=marks_on_days(1, 2)),
    ],
)
def test_a_capture_that_fails_on_one_rank_costs_the_step_and_the_graphs_of_all(
    two: Ranks, base: str, tmp_path: Path, points: str, code: str
) -> None:
    """And nothing else: batches keep their sizes."""
    for name in ("clean", "fails"):
        (tmp_path / name).mkdir()
    expected = train(two, base, tmp_path / "clean", points)
    assert not expected.verdicts and not expected.notes
    found = train(two, base, tmp_path / "fails", points, 1)
    assert [(one.code, one.retry) for one in found.verdicts] == [(code, True)]
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert ["no capture" in note for note in found.notes] == [True] * (code == CAPTURE_FAILED)
