"""Paged moments: the same numbers and the same files as without paging, though they pass through the device in
pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from coserve.admission.optimizers import SLICE, check_optimizer
from coserve.admission.shapes import flat_elements, lora_shapes
from coserve.core.errors import CheckpointUnreadable, InvalidRequest, JobOutOfMemory
from coserve.core.link.jobs import JobCheckpoint, JobFailed, JobProgress
from coserve.core.link.link import FromEngine
from coserve.core.names import ADAPTER_WEIGHTS, CHECKPOINT_STATE, CHECKPOINT_TENSORS
from coserve.core.training.jobs import JobSpec
from coserve.core.training.micro_step import MicroStep
from coserve.core.training.settings import Optimizer, TrainingSettings
from coserve.core.types import LoraSettings
from coserve.finetune.optimizer import AdapterOptimizer
from coserve.finetune.update_rules.rules import UpdateRule, make_rule
from tests.support.finetuning import Bench, job_spec, metrics_of, random_corpus
from tests.support.updates import BASE, EVERY, gradients, made, same, start, update

PAGED = [each for each in EVERY if each.values[0].paged]
PIECE = 256
"""Weights: the tests' adapters have more than `SLICE` pieces."""
paging = partial(AdapterOptimizer, piece=PIECE)


def paged(training: TrainingSettings, piece: int = PIECE) -> AdapterOptimizer:
    return AdapterOptimizer(start(), BASE.spec, training, torch.float32, piece=piece)


def unpaged(training: TrainingSettings) -> AdapterOptimizer:
    return made(msgspec.structs.replace(training, optimizer=training.optimizer.unpaged))


def settings(optimizer: Optimizer, ratio: float | None = None) -> TrainingSettings:
    return TrainingSettings(
        optimizer=optimizer, weight_decay=0.1, lora_plus_ratio=ratio, validation_split=0.1, early_stopping_patience=1
    )


def copied(tensors: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors().items()}


@pytest.mark.parametrize("optimizer", PAGED)
@pytest.mark.parametrize("ratio", [None, 8.0])
@pytest.mark.parametrize("piece", [256, 768, 1 << 20])
def test_updates_are_those_without_paging(optimizer: Optimizer, ratio: float | None, piece: int) -> None:
    """Bit for bit, while snapshots are held and while none is."""
    training = settings(optimizer, ratio)
    one, other = paged(training, piece), unpaged(training)
    one.warm_up()
    for step, found in enumerate(gradients(6)):
        update(one, found, 0.01 / (step + 1))
        update(other, found, 0.01 / (step + 1))
        if step in (1, 2):
            assert same(one, other)
    assert same(one, other)


@pytest.mark.parametrize("optimizer", PAGED)
def test_a_snapshot_stays_as_it_is_until_the_next_one(optimizer: Optimizer) -> None:
    one = paged(settings(optimizer))
    steps = gradients(5)
    update(one, steps[0], 0.01)
    for found in steps[1:]:
        held = one.snapshot()()
        before = {name: tensor.clone() for name, tensor in held.items()}
        for _ in range(3):
            update(one, found, 0.01)
            moments = [name for name in held if name.startswith("exp_avg")]
            assert moments and all(torch.equal(held[name], before[name]) for name in moments)
        one.snapshot(weights_only=True)()
        assert not all(torch.equal(tensor, before[name]) for name, tensor in one.snapshot()().items())


@pytest.mark.parametrize("optimizer", PAGED)
@pytest.mark.parametrize("to_paged", [False, True])
def test_either_goes_on_from_a_snapshot_of_the_other(optimizer: Optimizer, to_paged: bool) -> None:
    training = settings(optimizer, 8.0)
    straight, resumed = (unpaged(training), paged(training)) if to_paged else (paged(training), unpaged(training))
    steps = gradients(5)
    for found in steps[:3]:
        update(straight, found, 0.01)
    update(resumed, steps[4], 0.5)  # what it had is forgotten
    resumed.restore(copied(straight.snapshot()), steps=3)
    assert same(straight, resumed)
    for found in steps[3:]:
        update(straight, found, 0.01)
        update(resumed, found, 0.01)
    assert same(straight, resumed)


@pytest.mark.parametrize("optimizer", PAGED)
def test_a_snapshot_that_does_not_fit_changes_nothing(optimizer: Optimizer) -> None:
    one, other = paged(settings(optimizer)), paged(settings(optimizer))
    steps = gradients(3)
    for each in (one, other):
        update(each, steps[0], 0.01)
    broken = copied(one.snapshot())
    broken.popitem()
    for name in broken:
        broken[name] = torch.zeros_like(broken[name])
    with pytest.raises(CheckpointUnreadable, match="does not fit"):
        one.restore(broken, steps=1)
    for found in steps[1:]:
        for each in (one, other):
            update(each, found, 0.01)
    assert same(one, other)


def trained(root: Path, spec: JobSpec, *, micro_steps: int | None) -> tuple[list[FromEngine], list[bytes]]:
    """The messages of a whole job, and the files of its checkpoints and of its adapter."""
    bench = Bench(BASE, root, make_optimizer=paging)
    messages = bench.train(bench.place(random_corpus(), spec), micro_steps=micro_steps)
    files = [
        path / name for _, path in bench.folder.checkpoints(spec.id) for name in (CHECKPOINT_STATE, CHECKPOINT_TENSORS)
    ]
    adapter = next(bench.folder.root.rglob(ADAPTER_WEIGHTS))
    return messages, [path.read_bytes() for path in (*files, adapter)]


def spec_of(optimizer: Optimizer) -> JobSpec:
    return job_spec(
        random_corpus(), r=16, steps=4, checkpoint_steps=2, optimizer=optimizer, weight_decay=0.1, learning_rate=0.002
    )


@pytest.mark.parametrize("optimizer", PAGED)
def test_a_job_learns_and_writes_what_it_would_without_paging(tmp_path: Path, optimizer: Optimizer) -> None:
    expected = trained(tmp_path / "unpaged", spec_of(optimizer.unpaged), micro_steps=1)
    assert trained(tmp_path / "paged", spec_of(optimizer), micro_steps=1) == expected
    assert trained(tmp_path / "whole", spec_of(optimizer), micro_steps=None) == expected


def updates(bench: Bench, job: str) -> int:
    """Slices of the update that comes next, run to the job's next step."""
    count, messages = 0, list[FromEngine]()
    while not any(isinstance(message, JobProgress) for message in messages):
        count += bench.trainer.next_micro_step(job) is MicroStep.OPTIMIZER
        messages = bench.advance(job, 1)
    return count


def test_an_update_is_cut_into_slices(tmp_path: Path) -> None:
    counts = []
    for optimizer in (Optimizer.PAGED_LION, Optimizer.LION):
        bench = Bench(BASE, tmp_path / optimizer, make_optimizer=paging)
        spec = bench.place(random_corpus(), spec_of(optimizer))
        bench.start(spec)
        counts.append(updates(bench, spec.id))
    shapes = lora_shapes(LoraSettings(r=16), BASE.spec)
    pieces = flat_elements(part for one in shapes for part in (one.a, one.b)) // PIECE
    assert counts == [-(-pieces // SLICE), 1] and counts[0] > 2


@pytest.mark.parametrize("done", range(1, 4))
def test_an_update_that_is_interrupted_is_finished_first(tmp_path: Path, done: int) -> None:
    """A pause within an update: the checkpoint has the step, whose metrics are told once, and the job goes on bit for
    bit."""
    spec = spec_of(Optimizer.PAGED_ADAMW)
    expected, files = trained(tmp_path / "straight", spec, micro_steps=1)
    bench = Bench(BASE, tmp_path / "cut", make_optimizer=paging)
    bench.start(bench.place(random_corpus(), spec))
    for _ in range(done):
        while bench.trainer.next_micro_step(spec.id) is not MicroStep.OPTIMIZER:
            bench.advance(spec.id, 1)
        bench.advance(spec.id, 1)
    told, saved = list[FromEngine](), bench.save(spec.id)
    assert saved is not None
    again = Bench(BASE, tmp_path / "cut", make_optimizer=paging)
    assert again.start(spec).resumed_from == saved.step == 1
    told += again.run(spec.id, micro_steps=1)
    assert [one for one in told if not isinstance(one, JobCheckpoint)] == [
        one for one in expected if not isinstance(one, JobCheckpoint)
    ]
    assert metrics_of(told)[0].step == 1
    assert next(again.folder.root.rglob(ADAPTER_WEIGHTS)).read_bytes() == files[-1]


def test_paged_optimizers_are_refused_where_ranks_share_the_base() -> None:
    for optimizer, plain in ((Optimizer.PAGED_ADAMW, "adamw"), (Optimizer.PAGED_LION, "lion")):
        check_optimizer(optimizer, ranks=1)
        with pytest.raises(InvalidRequest, match=f"{optimizer} is not supported with --tp 2: use {plain}$") as refused:
            check_optimizer(optimizer, ranks=2)
        assert refused.value.field == "training.optimizer"


class Faulty:
    """Counts the pieces that a rule updates; memory runs out at the one of number `fails_at`."""

    def __init__(self, rule: UpdateRule, pieces: list[int], fails_at: int | None) -> None:
        self._rule, self._pieces, self._fails_at = rule, pieces, fails_at

    def update(self, number: int, learning_rate: float) -> None:
        self._pieces.append(number)
        if len(self._pieces) == self._fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB")
        self._rule.update(number, learning_rate)

    def set_steps(self, steps: int) -> None:
        self._rule.set_steps(steps)


def within_the_second_update(root: Path, spec: JobSpec, fails_after: int | None = None) -> tuple[Bench, list[int]]:
    """A job with a checkpoint of step 1, after the first slice of the next update, and the pieces that were updated.
    Memory runs out `fails_after` pieces into the rest of it."""
    pieces_of_one = flat_elements(p for one in lora_shapes(spec.lora, BASE.spec) for p in (one.a, one.b)) // PIECE
    pieces = list[int]()
    fails_at = None if fails_after is None else pieces_of_one + SLICE + fails_after
    faulty = partial(paging, make_rule=lambda ranges, training: Faulty(make_rule(ranges, training), pieces, fails_at))
    bench = Bench(BASE, root, make_optimizer=faulty)
    bench.start(bench.place(random_corpus(), spec))
    updates(bench, spec.id)
    while bench.trainer.next_micro_step(spec.id) is not MicroStep.OPTIMIZER:
        bench.advance(spec.id, 1)
    bench.advance(spec.id, 1)
    assert len(pieces) == pieces_of_one + SLICE and bench.trainer.next_micro_step(spec.id) is MicroStep.OPTIMIZER
    return bench, pieces


@pytest.mark.parametrize("pause", [False, True])
def test_a_half_updated_adapter_is_never_saved(tmp_path: Path, pause: bool) -> None:
    """Memory runs out while an interrupted update is finished: nothing of it is written or told, and the last
    checkpoint is as it was."""
    spec = msgspec.structs.replace(spec_of(Optimizer.PAGED_LION), id="cut")
    spec = msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, checkpoint_steps=1))
    _, files = trained(tmp_path / "straight", spec, micro_steps=1)
    bench, _ = within_the_second_update(tmp_path / "cut", spec, fails_after=3)
    with pytest.raises(JobOutOfMemory):
        if pause:
            bench.trainer.abandon(spec.id, finish_update=True)
        else:
            bench.save(spec.id)
    for refused in (bench.trainer.checkpoint, bench.trainer.publication, bench.trainer.snapshot):
        with pytest.raises(RuntimeError, match="was not finished"):
            refused(spec.id)
    assert [type(message) for message in bench.advance(spec.id, None)] == [JobFailed]
    bench.trainer.drop(spec.id)
    again = Bench(BASE, tmp_path / "cut", make_optimizer=paging)
    assert again.start(spec).resumed_from == 1
    again.run(spec.id, micro_steps=1)
    assert next(again.folder.root.rglob(ADAPTER_WEIGHTS)).read_bytes() == files[-1]


@pytest.mark.parametrize("drop", [False, True])
def test_an_update_whose_result_nobody_reads_is_not_finished(tmp_path: Path, drop: bool) -> None:
    bench, pieces = within_the_second_update(tmp_path, spec_of(Optimizer.PAGED_LION))
    done = len(pieces)
    if drop:
        bench.trainer.drop("job-1")
    else:
        bench.trainer.abandon("job-1")
        with pytest.raises(RuntimeError, match="was not finished"):
            bench.save("job-1")
    assert len(pieces) == done
