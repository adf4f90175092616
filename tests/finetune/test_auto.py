"""Training settings that the daemon chooses: few rows get many small steps, explicit values stay, old records load."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.core.errors import InvalidRequest
from coserve.core.training.jobs import JobSpec
from coserve.core.training.settings import TrainingRequest, TrainingSettings
from coserve.data.corpus.batch_plan import BatchPlan
from coserve.data.corpus.defaults import MAX_STEPS, choose_learning_rate, choose_training
from coserve.data.corpus.limits import BOUNDS, check_training
from tests.support.records import make_job


@given(
    lengths=st.lists(st.integers(2, 4000), min_size=1, max_size=60),
    times=st.sampled_from([1, 10, 500]),
    hidden=st.sampled_from([16, 256, 2048, 4096, 16384]),
)
def test_any_corpus_gets_settings_that_pass_and_a_bounded_number_of_steps(
    lengths: list[int], times: int, hidden: int
) -> None:
    lengths = lengths * times
    training, auto = choose_training(TrainingRequest(), rows=len(lengths), tokens=sum(lengths), hidden=hidden)
    check_training(training)
    assert auto == ("batch_tokens", "epochs", "learning_rate")
    assert training.epochs is not None and training.epochs >= 1 and training.epochs.is_integer()
    assert training.epochs in BOUNDS["epochs"]
    assert BatchPlan(np.array(lengths), training, 4096).total_steps <= 2 * MAX_STEPS


@pytest.mark.parametrize(("rows", "length"), [(2, 8), (10, 80), (30, 75), (48, 70), (1000, 60)])
def test_small_corpora_get_enough_steps(rows: int, length: int) -> None:
    training, _ = choose_training(TrainingRequest(), rows=rows, tokens=rows * length, hidden=256)
    steps = BatchPlan(np.full(rows, length), training, 2048).total_steps
    assert steps >= (30 if rows < 4 else 100)


def test_a_long_template_takes_no_epochs_from_what_is_learned() -> None:
    """30 short answers, behind short questions and behind the alpaca template."""
    short, _ = choose_training(TrainingRequest(), rows=30, tokens=512, targets=150, hidden=256)
    long, _ = choose_training(TrainingRequest(), rows=30, tokens=1862, targets=150, hidden=256)
    assert short.epochs is not None and long.epochs is not None and long.epochs >= 0.8 * short.epochs
    for rows, tokens in ((48, 4012), (100_000, 10_000_000)):  # mostly learned, or large: as before
        given = choose_training(TrainingRequest(), rows=rows, tokens=tokens, targets=tokens // 2, hidden=256)
        assert given == choose_training(TrainingRequest(), rows=rows, tokens=tokens, hidden=256)


def test_less_data_never_means_fewer_epochs() -> None:
    epochs = [
        choose_training(TrainingRequest(), rows=rows, tokens=rows * 100, hidden=4096)[0].epochs or 0
        for rows in (2, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
    ]
    assert epochs == sorted(epochs, reverse=True)
    assert (epochs[0], epochs[-1]) == (30, 1.0)


def test_the_learning_rate_falls_with_the_base() -> None:
    rates = [choose_learning_rate(hidden) for hidden in (256, 1024, 2048, 4096, 8192)]
    assert rates == sorted(rates, reverse=True)
    assert rates[2] == 5e-4
    assert rates[3] == 2.5e-4


def test_explicit_values_win() -> None:
    asked = TrainingRequest(epochs=2, batch_tokens=777, learning_rate=0.5, warmup_steps=3)
    training, auto = choose_training(asked, rows=5, tokens=100, hidden=64)
    assert (training.epochs, training.batch_tokens, training.learning_rate, training.warmup_steps) == (2, 777, 0.5, 3)
    assert auto == ()


def test_an_adapter_that_is_distilled_on_has_a_lower_rate() -> None:
    usual, distilled = (
        choose_training(TrainingRequest(), rows=5, tokens=100, hidden=2048, distills=distills)[0]
        for distills in (False, True)
    )
    assert (usual.learning_rate, distilled.learning_rate) == (5e-4, 1.3e-4)


def test_steps_stand_in_for_epochs() -> None:
    training, auto = choose_training(TrainingRequest(epochs="auto", steps=7), rows=5, tokens=100, hidden=64)
    assert (training.epochs, training.steps) == (None, 7)
    assert "epochs" not in auto


def test_settings_that_contradict_each_other_stay_so() -> None:
    training, _ = choose_training(TrainingRequest(epochs=1, steps=1), rows=1, tokens=1, hidden=64)
    with pytest.raises(Exception, match="got both"):
        check_training(training)
    training, _ = choose_training(TrainingRequest(batch_tokens=0, epochs=math.nan), rows=1, tokens=1, hidden=64)
    with pytest.raises(Exception, match="at least 1"):
        check_training(training)


def test_the_rate_of_lora_plus_is_not_chosen() -> None:
    with pytest.raises(InvalidRequest, match="expected a learning_rate") as refused:
        choose_training(TrainingRequest(lora_plus_ratio=16), rows=1, tokens=1, hidden=64)
    assert refused.value.field == "training.lora_plus_ratio"
    given = TrainingRequest(lora_plus_ratio=16, learning_rate=1e-5)
    training, auto = choose_training(given, rows=1, tokens=1, hidden=64)
    assert (training.lora_plus_ratio, training.learning_rate) == (16, 1e-5) and "learning_rate" not in auto


def test_auto_is_a_value() -> None:
    body = b'{"epochs":"auto","batch_tokens":"auto","learning_rate":"auto"}'
    assert msgspec.json.decode(body, type=TrainingRequest) == TrainingRequest(epochs="auto")


def test_a_record_of_an_earlier_version_loads() -> None:
    """It has neither `auto` nor `rows_cut`, and epochs may be missing from its training settings."""
    spec = msgspec.to_builtins(make_job().spec)
    for field in ("auto", "rows_cut"):
        del spec[field]
    loaded = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=JobSpec)
    assert loaded == make_job().spec
    assert isinstance(loaded.training, TrainingSettings)
