"""Layers that run as graphs learn what they learn without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from coserve.admission.micro_batch import padded
from coserve.admission.recompute_plan import RecomputePlan
from coserve.core.link.jobs import JobSucceeded
from coserve.core.link.link import FromEngine
from coserve.core.training.jobs import JobSpec
from coserve.data.corpus.tokenized import Corpus
from coserve.finetune.layers.graphs import MOST_RELEASES, LayerGraphs
from coserve.finetune.memory_limits import BatchLimits
from coserve.model.base import Base
from coserve.model.layers import LayerCut
from coserve.model.training.compiled_layers import CompiledLayers
from tests.support.examples import marks_on_days, on_days
from tests.support.finetuning import Bench, job_spec, metrics_of, random_corpus, tiny_base, train_together
from tests.support.interpreted import interpreted
from tests.support.layer_graphs import RepeatingRecorder
from tests.support.lora_backends import SEGMENTED

LIMITS = BatchLimits(32)
Jobs = Sequence[tuple[Corpus, JobSpec]]


@pytest.fixture(scope="module")
def compiled() -> tuple[Base, CompiledLayers]:
    base = tiny_base("llama")
    layers = CompiledLayers(base, LayerCut(base), interpreted)
    layers.compile()
    return base, layers


def job(number: int, steps: int = 4, **changes: object) -> tuple[Corpus, JobSpec]:
    """Graphs compute the third batch of a shape."""
    corpus = random_corpus(number, [(5, 2, 4, 6), (3, 6, 7, 2)][number % 2])
    targets = ("q_proj", "down_proj")  # each kernel takes its time in Triton's interpreter
    options = {"r": 8, "steps": steps, "seed": number, "batch_tokens": 8, "micro_batch_tokens": 8, "targets": targets}
    options |= changes
    return corpus, job_spec(corpus, f"job-{number}", adapter=f"a{number}", **options)


def train(
    base: Base, root: Path, layers: CompiledLayers, graphs: LayerGraphs | None, jobs: Jobs
) -> dict[str, list[FromEngine]]:
    bench = Bench(base, root, compiled=layers, graphs=graphs, lora_backend=SEGMENTED, limits=LIMITS)
    specs = [bench.place(corpus, spec) for corpus, spec in jobs]
    for spec in specs:
        bench.start(spec)
    found = train_together(bench, specs, micro_steps=3)
    assert all(isinstance(messages[-1], JobSucceeded) for messages in found.values()), found
    return found


def losses(found: dict[str, list[FromEngine]]) -> torch.Tensor:
    return torch.tensor([(one.loss, one.grad_norm) for messages in found.values() for one in metrics_of(messages)])


Plain = Callable[[Jobs], torch.Tensor]


@pytest.fixture(scope="module")
def plain(compiled: tuple[Base, CompiledLayers], tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Losses of jobs without graphs: each once, for all tests."""
    known = dict[str, torch.Tensor]()

    def found(jobs: Jobs) -> torch.Tensor:
        name = repr([spec for _, spec in jobs])
        if name not in known:
            base, layers = compiled
            known[name] = losses(train(base, tmp_path_factory.mktemp("plain"), layers, None, jobs))
        return known[name]

    return found


def graphs_of(layers: CompiledLayers, *recorders: RepeatingRecorder, **options: int) -> LayerGraphs:
    left = iter(recorders)
    return LayerGraphs(layers, lambda: next(left), least_step=8, **options)


@pytest.mark.parametrize(
    "jobs",
    [
        pytest.param((job(0, steps=2),), id="one"),
        pytest.param((job(0, steps=6), job(1, steps=6)), id="alike", marks=marks_on_days(1)),
        pytest.param((job(0, steps=6), job(2, steps=6, r=16)), id="unlike", marks=marks_on_days(2)),
    ],
)
def test_jobs_learn_what_they_learn_without(
    compiled: tuple[Base, CompiledLayers], plain: Plain, tmp_path: Path, jobs: Jobs
) -> None:
    base, layers = compiled
    recorder = RepeatingRecorder()
    found = train(base, tmp_path, layers, graphs_of(layers, recorder), jobs)
    assert recorder.pool_runs and recorder.recorded and recorder.replayed
    torch.testing.assert_close(losses(found), plain(jobs), rtol=1e-4, atol=1e-5)


def test_a_job_without_graphs_is_told(compiled: tuple[Base, CompiledLayers], tmp_path: Path) -> None:
    """The kernels cannot read matrices of rank 4 where they are. Other jobs have graphs all the same."""
    base, layers = compiled
    recorder = RepeatingRecorder()
    graphs = graphs_of(layers, recorder)
    train(base, tmp_path / "small", layers, graphs, (job(0, steps=2, r=4),))
    assert not recorder.recorded and not graphs.notes, "no job is left"
    bench = Bench(base, tmp_path / "told", compiled=layers, graphs=graphs, lora_backend=SEGMENTED)
    corpus, spec = job(0, r=4)
    bench.start(bench.place(corpus, spec))
    while not graphs.notes:
        bench.trainer.advance(spec.id, 1)
    assert "no multiple of 8" in graphs.notes[0]
    graphs.job_ended(last=False)
    assert graphs.notes, "it may be told of another job"


@on_days(0)
def test_a_job_has_the_graphs_of_an_earlier_one_of_its_shape(
    compiled: tuple[Base, CompiledLayers], tmp_path: Path
) -> None:
    base, layers = compiled
    recorder = RepeatingRecorder()
    graphs = graphs_of(layers, recorder)
    for name in ("first", "second"):
        before = recorder.recorded
        train(base, tmp_path / name, layers, graphs, (job(0),))
    assert before and recorder.recorded == before


@on_days(1)
@pytest.mark.parametrize("failing", [0, 3])
def test_a_capture_that_fails_costs_the_step_alone(
    compiled: tuple[Base, CompiledLayers], plain: Plain, tmp_path: Path, failing: int
) -> None:
    base, layers = compiled
    recorder = RepeatingRecorder(lambda number: RuntimeError("no capture") if number == failing else None)
    graphs = graphs_of(layers, recorder)
    found = train(base, tmp_path, layers, graphs, (job(0),))
    assert "without CUDA graphs: no capture" in graphs.notes[0] and not recorder.replayed
    torch.testing.assert_close(losses(found), plain([job(0)]), rtol=1e-4, atol=1e-5)


@on_days(2)
def test_memory_that_runs_out_takes_the_graphs_first(compiled: tuple[Base, CompiledLayers], tmp_path: Path) -> None:
    base, layers = compiled
    full = RepeatingRecorder(lambda number: torch.OutOfMemoryError("CUDA out of memory") if number == 1 else None)
    last = RepeatingRecorder()
    graphs = graphs_of(layers, full, last, batches_without=1)
    found = train(base, tmp_path, layers, graphs, (job(0),))
    assert last.replayed and not graphs.notes
    assert not [message for message in found["job-0"] if type(message).__name__ == "JobNote"]


@on_days(3)
def test_a_batch_that_found_no_memory_runs_again_without_graphs(
    compiled: tuple[Base, CompiledLayers], tmp_path: Path
) -> None:
    """If it runs out again, its job takes less; the graphs of others are not given up for it."""
    base, layers = compiled
    full = RepeatingRecorder(lambda number: torch.OutOfMemoryError("CUDA out of memory"))
    graphs = graphs_of(layers, full)  # a second pool would raise StopIteration
    train(base, tmp_path, layers, graphs, (job(0),))
    assert full.pool_runs and not full.recorded and not graphs.notes


def test_memory_that_a_suspended_pass_holds_is_not_freed(compiled: tuple[Base, CompiledLayers], tmp_path: Path) -> None:
    base, layers = compiled
    recorder, (corpus, spec) = RepeatingRecorder(), job(0)
    graphs = graphs_of(layers, recorder)
    bench = Bench(base, tmp_path, compiled=layers, graphs=graphs, lora_backend=SEGMENTED)
    bench.start(bench.place(corpus, spec))
    assert not graphs.release(), "there is none"
    while not recorder.pool_runs:
        bench.trainer.advance(spec.id, 1)
    assert not graphs.release(), "its tensors lie there"
    assert not graphs.release(), "the pass ends, and with it the pool"


def test_memory_of_graphs_is_freed_between_passes(compiled: tuple[Base, CompiledLayers], tmp_path: Path) -> None:
    base, layers = compiled
    graphs = graphs_of(layers, RepeatingRecorder())
    train(base, tmp_path, layers, graphs, (job(0, steps=1),))
    assert graphs.release()
    assert not graphs.release()


@on_days(4)
def test_memory_that_runs_out_again_and_again_ends_graphs_until_no_job_is_left(
    compiled: tuple[Base, CompiledLayers], tmp_path: Path
) -> None:
    base, layers = compiled
    full = [
        RepeatingRecorder(lambda number: torch.OutOfMemoryError("CUDA out of memory")) for _ in range(MOST_RELEASES)
    ]
    last = RepeatingRecorder()
    graphs = graphs_of(layers, *full, last, batches_without=0)
    bench = Bench(base, tmp_path, compiled=layers, graphs=graphs, lora_backend=SEGMENTED, limits=LIMITS)
    jobs = [job(0), job(1)]
    specs = [bench.place(corpus, spec) for corpus, spec in jobs]
    bench.start(specs[0])
    bench.run(specs[0].id)
    assert "not enough memory" in graphs.notes[0] and not last.recorded
    bench.trainer.drop(specs[0].id)
    assert not graphs.notes
    bench.start(specs[1])
    bench.run(specs[1].id)
    assert last.replayed


@on_days(5)
def test_few_shapes_have_graphs_and_idle_ones_give_way(compiled: tuple[Base, CompiledLayers], tmp_path: Path) -> None:
    base, layers = compiled
    recorder = RepeatingRecorder()
    graphs = graphs_of(layers, recorder, max_shapes=1, evict_after=2)
    train(base, tmp_path / "a", layers, graphs, (job(0),))
    before = recorder.recorded
    train(base, tmp_path / "b", layers, graphs, (job(2, r=16),))
    assert recorder.recorded > before


@on_days(0)
def test_graphs_of_layers_that_are_recomputed_or_keep_less(
    compiled: tuple[Base, CompiledLayers], plain: Plain, tmp_path: Path
) -> None:
    base = tiny_base("llama")
    keeping_less = CompiledLayers(base, LayerCut(base), interpreted)
    keeping_less.compile()
    keeping_less.compile_levels()
    cases = [(*compiled, 1, 0), *((base, keeping_less, *counts) for counts in ((2, 0), (0, 2), (1, 1)))]
    for number, (own_base, layers, recomputed, partly) in enumerate(cases):
        recorder, (corpus, spec) = RepeatingRecorder(), job(0, steps=4)
        bench = Bench(
            own_base,
            tmp_path / str(number),
            compiled=layers,
            graphs=graphs_of(layers, recorder),
            lora_backend=SEGMENTED,
        )
        bench.start(bench.place(corpus, spec))
        bench.trainer.limit(spec.id, RecomputePlan(1 << 20, recomputed, partly, compiled=True))
        found = {spec.id: bench.run(spec.id)}
        assert recorder.replayed
        torch.testing.assert_close(losses(found), plain([(corpus, spec)]), rtol=5e-3, atol=1e-4)


@on_days(1)
def test_graphs_are_captured_anew_once_layers_can_keep_less(tmp_path: Path) -> None:
    """Those from before keep more than is planned for."""
    base = tiny_base("llama")
    layers = CompiledLayers(base, LayerCut(base), interpreted)
    layers.compile()
    recorder = RepeatingRecorder()
    bench = Bench(base, tmp_path, compiled=layers, graphs=graphs_of(layers, recorder), lora_backend=SEGMENTED)
    recorded = []
    for name in ("before", "after"):
        corpus, spec = job(0, steps=3)
        spec = msgspec.structs.replace(spec, id=name, adapter=name)
        bench.start(bench.place(corpus, spec))
        bench.trainer.limit(name, RecomputePlan(1 << 20, recomputed=2, compiled=True))
        bench.run(name)
        recorded.append(recorder.recorded)
        bench.trainer.drop(name)
        layers.compile_levels()
    assert recorded[1] == 2 * recorded[0] > 0


@on_days(2)
def test_a_shape_without_graphs_runs_in_their_memory(
    compiled: tuple[Base, CompiledLayers], plain: Plain, tmp_path: Path
) -> None:
    base, layers = compiled
    recorder = RepeatingRecorder()
    graphs = graphs_of(layers, recorder, max_shapes=1, evict_after=1000)
    train(base, tmp_path / "a", layers, graphs, (job(0, steps=3),))
    recorded, before = recorder.recorded, recorder.pool_runs
    other = job(2, steps=2, r=16)
    found = train(base, tmp_path / "b", layers, graphs, (other,))
    assert recorder.recorded == recorded and recorder.pool_runs > before
    torch.testing.assert_close(losses(found), plain([other]), rtol=1e-4, atol=1e-5)


@on_days(3)
def test_graphs_leave_their_memory_to_a_job_that_runs_other_layers(
    compiled: tuple[Base, CompiledLayers], tmp_path: Path
) -> None:
    base, layers = compiled
    first, second = RepeatingRecorder(), RepeatingRecorder()
    graphs = graphs_of(layers, first, second, batches_without=2)
    train(base, tmp_path / "a", layers, graphs, (job(0, steps=3),))
    assert first.recorded
    train(base, tmp_path / "b", layers, graphs, (job(1, steps=1, dropout=0.1),))
    train(base, tmp_path / "c", layers, graphs, (job(0, steps=4),))
    assert second.recorded, "once no other layers have run for a while"


def test_sizes_of_batches() -> None:
    assert [padded(tokens) for tokens in (1, 64, 65, 512, 1000, 2047, 4096, 4097)] == [
        *(64, 64, 128, 512, 1024, 2048, 4096, 4352),
    ]
    assert all(tokens <= padded(tokens) <= max(64, tokens * 17 // 16) + 64 for tokens in range(1, 9000))
