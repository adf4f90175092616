from __future__ import annotations

import math
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.errors import InvalidRequest
from coserve.core.training.jobs import JobState
from coserve.core.training.settings import DpoLoss, OrpoLoss, PreferenceLoss, Schedule, SimpoLoss, TrainingSettings
from coserve.data.corpus.batch_plan import MAX_ROWS_ON_TICK, BatchPlan, pack
from coserve.data.corpus.limits import BOUNDS, check_training, longest_row
from coserve.finetune.loop import learning_rate

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def plan(lengths: list[int], limit: int = 1000, **settings: object) -> BatchPlan:
    return BatchPlan(np.array(lengths, np.int64), TrainingSettings(**settings), limit)


def rows_of(steps: BatchPlan, step: int) -> list[int]:
    return [row for micro in steps.step(step).micro_batches for row in micro]


@given(LENGTHS, st.integers(1, 3), st.integers(1, 80), st.integers(2, 60), st.integers(0, 5), st.sampled_from([0, 0.3]))
def test_every_epoch_reads_every_row_once(
    lengths: list[int], epochs: int, batch: int, micro: int, seed: int, split: float
) -> None:
    if split and len(lengths) < 2:
        return
    settings = {"epochs": epochs, "batch_tokens": batch, "micro_batch_tokens": micro, "seed": seed}
    one = plan(lengths, validation_split=split, **settings)
    held = {row for micro_batch in one.validation() for row in micro_batch}
    assert bool(held) == bool(split)
    read: list[int] = []
    epochs_done = []
    for step in range(one.total_steps):
        here = rows_of(one, step)
        assert here and sum(lengths[row] for row in here[:-1]) < batch
        for micro_batch in one.step(step).micro_batches:
            assert micro_batch and (sum(lengths[row] for row in micro_batch) <= micro or len(micro_batch) == 1)
        read += here
        epochs_done.append(one.step(step).epoch)
    share = sorted(set(range(len(lengths))) - held)
    for epoch in range(epochs):
        assert sorted(read[epoch * len(share) : (epoch + 1) * len(share)]) == share
    assert len(read) == epochs * len(share)
    assert epochs_done == sorted(epochs_done) and epochs_done[-1] == epochs


@given(LENGTHS, st.integers(1, 40), st.integers(0, 3), st.integers(0, 40))
def test_a_plan_is_a_function_of_its_arguments(lengths: list[int], steps: int, seed: int, start: int) -> None:
    one, other = (plan(lengths, steps=steps, batch_tokens=50, seed=seed) for _ in range(2))
    assert one.total_steps == steps
    expected = [one.step(step) for step in range(steps)]
    resumed = [other.step(step) for step in range(min(start, steps - 1), steps)]
    assert resumed == expected[min(start, steps - 1) :]


@given(LENGTHS, st.integers(1, 40), st.integers(0, 31), st.integers(0, 3), st.sampled_from([0.0, 0.3]))
def test_rows_to_learn_first_are_read_alone_in_the_first_third(
    lengths: list[int], steps: int, first: int, seed: int, split: float
) -> None:
    if split and len(lengths) < 2:
        return
    settings = TrainingSettings(steps=steps, batch_tokens=50, seed=seed, validation_split=split)
    make = partial(BatchPlan, np.array(lengths, np.int64), settings, 1000, first_rows=first)
    one, own = make(), set(range(len(lengths))[-first:] if first else ())
    rest = set(range(len(lengths))) - own
    held = {row for micro_batch in one.validation() for row in micro_batch}
    staged = bool(own - held) and bool(rest - held)
    read = 0
    for step in range(steps):
        here = rows_of(one, step)
        read += len(here)
        assert one.step(step).epoch == pytest.approx(read / (len(lengths) - len(held)))
        assert here and (not staged or set(here) <= (own if step < round(steps / 3) else rest))
        assert make().step(step) == one.step(step), "a resumed job reads the same"


def test_steps_of_an_epoch_are_of_about_one_size() -> None:
    one = plan([7, 9, 8, 8, 6, 10] * 10, epochs=1, batch_tokens=450)
    sizes = [sum([7, 9, 8, 8, 6, 10][row % 6] for row in rows_of(one, step)) for step in range(one.total_steps)]
    assert len(sizes) == 2 and sum(sizes) == 480 and max(sizes) - min(sizes) <= 20


def test_seeds_and_epochs_differ_in_order() -> None:
    lengths = [5] * 40
    orders = [
        [rows_of(plan(lengths, epochs=2, batch_tokens=200, seed=seed), step) for step in (0, 1)] for seed in (0, 1)
    ]
    flat = [tuple(order) for pair in orders for order in pair]
    assert len(set(flat)) == 4 and all(sorted(order) == list(range(40)) for order in flat)


@pytest.mark.parametrize(("epochs", "steps"), [(None, 30), (1, 10), (0.5, 5), (0.01, 1), (2.25, 22), (2.0, 20)])
def test_fractions_of_epochs(epochs: float | None, steps: int) -> None:
    assert plan([10] * 20, epochs=epochs, batch_tokens=20).total_steps == steps


def test_the_engine_bounds_micro_batches() -> None:
    assert all(len(m) == 1 for m in plan([10] * 6, limit=12, steps=1, micro_batch_tokens=40).step(0).micro_batches)
    training = TrainingSettings(max_length=64, micro_batch_tokens=48)
    assert longest_row(training, 128, 1000) == 48
    assert longest_row(TrainingSettings(), 128, 1000) == 128
    assert longest_row(TrainingSettings(max_length=64), 128, 50) == 50
    with pytest.raises(InvalidRequest, match="context of 32"):
        longest_row(training, 32, 1000)


@pytest.mark.parametrize("warmup", [0, 4])
def test_learning_rates(warmup: int) -> None:
    rates = {
        schedule: [
            learning_rate(TrainingSettings(learning_rate=1.0, warmup_steps=warmup, schedule=schedule), step, 12)
            for step in range(12)
        ]
        for schedule in Schedule
    }
    for schedule, found in rates.items():
        assert found[:warmup] == pytest.approx([(step + 1) / (warmup + 1) for step in range(warmup)])
        assert found[warmup] == 1.0
        assert all(rate > 0 for rate in found)
        falls = all(a >= b for a, b in zip(found[warmup:], found[warmup + 1 :], strict=False))
        assert falls and (found[-1] < 0.2) == (schedule is not Schedule.CONSTANT)
    n = 12 - warmup
    assert rates[Schedule.LINEAR][warmup:] == pytest.approx([1 - k / n for k in range(n)])
    assert rates[Schedule.COSINE][warmup:] == pytest.approx([(1 + math.cos(math.pi * k / n)) / 2 for k in range(n)])


BAD = [
    *(("steps", 0), ("steps", BOUNDS["steps"].most + 1), ("epochs", 0.0), ("epochs", math.nan), ("epochs", math.inf)),
    *(("epochs", BOUNDS["epochs"].most + 1.0), ("batch_tokens", 0), ("micro_batch_tokens", 1), ("max_length", 1)),
    *(("learning_rate", 0.0), ("learning_rate", -1e-4), ("learning_rate", math.nan), ("learning_rate", math.inf)),
    *(("warmup_steps", -1), ("beta1", 1.0), ("beta1", 1 - 1e-9), ("beta2", -0.1), ("beta2", math.nan), ("eps", 0.0)),
    *(("weight_decay", -1.0), ("weight_decay", math.nan), ("max_grad_norm", -1.0), ("max_grad_norm", math.inf)),
    *(("lora_plus_ratio", 0.5), ("lora_plus_ratio", math.nan), ("lora_plus_ratio", 1e7), ("neftune_alpha", 0.0)),
    *(("neftune_alpha", math.nan), ("neftune_alpha", 1001.0), ("validation_split", 1.0), ("validation_split", -0.5)),
    *(("early_stopping_patience", 0), ("early_stopping_patience", 3), ("eval_steps", 0), ("checkpoint_steps", 0)),
    *(("seed", -1), ("seed", 2**62)),
]


TINY = 1e-320
"""0 in fp32, of which the least normal number is about 1.18e-38."""


@pytest.mark.parametrize(
    "name",
    [
        *("eps", "beta1", "beta2", "learning_rate", "weight_decay", "max_grad_norm", "lora_plus_ratio"),
        *("neftune_alpha", "sample_temperature"),
    ],
)
@pytest.mark.parametrize("value", [TINY, 1e-39, -TINY])
def test_a_number_that_is_none_in_fp32(name: str, value: float) -> None:
    training = msgspec.structs.replace(TrainingSettings(), **{name: value})
    with pytest.raises(
        InvalidRequest, match=r"expected at least 1\.18e-38, the least normal fp32 number, got"
    ) as refused:
        check_training(training)
    assert refused.value.field == f"training.{name}"


def test_a_beta_of_a_dpo_loss_that_is_none_in_fp32() -> None:
    with pytest.raises(InvalidRequest, match="the least normal fp32 number") as refused:
        check_training(msgspec.structs.replace(TrainingSettings(), loss=DpoLoss(beta=TINY)))
    assert refused.value.field == "training.loss.beta"


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (DpoLoss(loss_type="hinge", label_smoothing=0.1), "label_smoothing"),
        (DpoLoss(loss_type="robust", label_smoothing=0.5), "label_smoothing"),
        (DpoLoss(sft_weight=-1.0), "sft_weight"),
        (OrpoLoss(beta=0.0), "beta"),
        (SimpoLoss(gamma=-0.1), "gamma"),
    ],
)
def test_settings_of_a_preference_loss_that_mean_nothing_are_refused(loss: PreferenceLoss, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_training(msgspec.structs.replace(TrainingSettings(), loss=loss))
    assert refused.value.field == f"training.loss.{field}"


def test_numbers_at_the_ends_of_fp32() -> None:
    check_training(msgspec.structs.replace(TrainingSettings(), eps=2.0**-126, beta1=1 - 2.0**-24, weight_decay=0.0))


@pytest.mark.parametrize(("name", "value"), BAD)
def test_settings_that_make_no_sense(name: str, value: float) -> None:
    training = msgspec.structs.replace(TrainingSettings(), **{name: value})
    with pytest.raises(InvalidRequest) as refused:
        check_training(training)
    assert refused.value.field == f"training.{name}"
    with pytest.raises(InvalidRequest):
        BatchPlan(np.array([4]), training, 64)


def test_settings_that_do_not_fit_the_corpus() -> None:
    with pytest.raises(InvalidRequest, match="at least 2 rows"):
        plan([5], validation_split=0.5)
    with pytest.raises(InvalidRequest, match="epochs or steps, got both"):
        plan([5], epochs=1, steps=1)
    with pytest.raises(InvalidRequest, match="over all epochs"):
        plan([2] * 200_000, epochs=1000)
    assert len(plan([5, 5], validation_split=0.999, steps=1).validation()[0]) == 1


def test_moves_between_states() -> None:
    legal = {(one, other) for one in JobState for other in JobState if one.can_become(other)}
    assert not any(one.terminal or one is other for one, other in legal)
    assert (JobState.QUEUED, JobState.SUCCEEDED) not in legal and (JobState.PAUSED, JobState.SUCCEEDED) not in legal
    assert {other for one, other in legal if one is JobState.RUNNING} == set(JobState) - {JobState.RUNNING}
    for state in (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED):
        assert {(state, JobState.FAILED), (state, JobState.CANCELLED)} <= legal


def first_fit(sizes: list[int], limit: int) -> list[list[int]]:
    """As a plain loop."""
    bins: list[list[int]] = []
    for index, size in enumerate(sizes):
        room = (b for b in bins if sum(sizes[i] for i in b) + size <= limit)
        found = next(room, None)
        if found is None:
            bins.append([index])
        else:
            found.append(index)
    return bins


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 80))
def test_packing_is_what_a_plain_loop_gives(sizes: list[int], limit: int) -> None:
    """Jobs go on after an upgrade: what they read must not change."""
    assert pack(sizes, limit) == first_fit(sizes, limit)


class Counted(int):
    """A size that counts how often it, or what is computed from it, is compared."""

    comparisons = 0

    def _count(self, answer: bool) -> bool:
        Counted.comparisons += 1
        return answer

    def __gt__(self, other: int) -> bool:
        return self._count(int(self) > int(other))

    def __lt__(self, other: int) -> bool:
        return self._count(int(self) < int(other))

    def __eq__(self, other: object) -> bool:
        return self._count(int(self) == other)

    __hash__ = int.__hash__

    def __sub__(self, other: int) -> Counted:
        return Counted(int(self) - int(other))

    def __rsub__(self, other: int) -> Counted:
        return Counted(int(other) - int(self))


def comparisons(sizes: list[int], limit: int) -> int:
    """Of the search for a bin, and of bringing the tree up to date."""
    Counted.comparisons = 0
    pack([Counted(size) for size in sizes], Counted(limit))
    return Counted.comparisons


@pytest.mark.parametrize("shape", ["one word", "alone", "falling"])
def test_packing_many_rows_takes_few_comparisons(shape: str) -> None:
    for rows in (500, 4000):
        sizes = {"one word": [2] * rows, "alone": [60] * rows, "falling": [50 - i * 50 // rows for i in range(rows)]}
        found = comparisons(sizes[shape], 64)
        assert 0 < found <= 6 * rows * math.log2(rows), "one descent and two updates a row"


def test_work_on_many_rows_is_prepared_ahead_and_can_be_stopped() -> None:
    class Enough(Exception): ...

    def stop() -> None:
        raise Enough

    lengths = [3] * (2 * MAX_ROWS_ON_TICK)
    with pytest.raises(Enough):
        BatchPlan(np.array(lengths), TrainingSettings(epochs=2), 64, stop)
    few_rows_a_step, one_step = plan(lengths, epochs=2, batch_tokens=300), plan(lengths, epochs=2, batch_tokens=1 << 40)
    for one, ahead in ((few_rows_a_step, True), (one_step, False)):
        for step in (0, one.total_steps // 2):  # the first of each epoch
            assert not one.prepared(step)
            with pytest.raises(Enough):
                one.prepare(step, stop)
            one.prepare(step)
            assert one.prepared(step)
            assert one.prepared(step + 1) == (ahead or step + 1 == one.total_steps)
    assert all(plan([3] * 40, epochs=2, batch_tokens=30).prepared(step) for step in (0, 1))
    assert not plan([3] * 40, steps=1000, batch_tokens=30).prepared(900), "all epochs before it have to be counted"
