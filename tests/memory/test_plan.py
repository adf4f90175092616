"""The pool gets what nothing else can need; what does not fit is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coserve.core.errors import ConfigError
from coserve.core.gpu_memory import GIB, LinearBytes
from coserve.memory.plan import GRAPHS, GpuMemory, Work, make_plan
from coserve.memory.profile import Profile
from tests.support.gpu_memory import COSTS

PROFILE = Profile(
    no_grad=LinearBytes(fixed=0.5 * GIB, per_token=0.5 * GIB / 2048),
    act=LinearBytes(fixed=0, per_token=8 * GIB / 2048),
    backward=LinearBytes(fixed=1 * GIB, per_token=0),
    job=GIB // 2,
    costs=COSTS,
    error=0.01,
)
WORK = Work(step_tokens=2048, micro_batch_tokens=2048, jobs=4)
PAGE = 2 << 20


def test_an_8b_shape_on_a_gpu_of_140_gib() -> None:
    plan = make_plan(GpuMemory(140 * GIB, 124 * GIB), 0.9, PROFILE, WORK, page_bytes=PAGE, least=128)
    assert (plan.taken, plan.step, plan.training, plan.jobs) == (16 * GIB, GIB, 9 * GIB, 2 * GIB)
    left = 126 - 16 - 1 - 9 - 2 - GRAPHS // GIB
    assert plan.pages == left * GIB // PAGE - 1
    assert plan.graphs == GRAPHS
    measured = make_plan(GpuMemory(140 * GIB, 124 * GIB), 0.9, PROFILE, WORK, page_bytes=PAGE, least=128, graphs=GIB)
    assert measured.pages - plan.pages == (GRAPHS - GIB) // PAGE, "the pool gets what graphs do not take"
    note = plan.note(16)
    assert f"pool of {plan.pages} pages ({plan.pages * 16} tokens" in note
    assert "an error of +1.0%" in note


@given(
    total=st.integers(1, 200),
    used=st.floats(0, 0.9),
    fraction=st.floats(0.1, 1.0),
    batch=st.integers(1, 1 << 16),
    least=st.integers(1, 1000),
)
def test_the_parts_never_exceed_the_budget(total: int, used: float, fraction: float, batch: int, least: int) -> None:
    gpu = GpuMemory(total * GIB, int(total * GIB * (1 - used)))
    work = Work(2048, batch, 2)
    try:
        plan = make_plan(gpu, fraction, PROFILE, work, page_bytes=PAGE, least=least)
    except ConfigError:
        assume(False)
    whole = plan.taken + plan.set_aside
    assert whole == plan.taken + plan.step + plan.training + plan.jobs + GRAPHS + (plan.pages + 1) * PAGE
    assert whole <= total * GIB * fraction
    assert whole > total * GIB * fraction - 2 * PAGE
    assert plan.pages >= least


@given(batch=st.integers(2048, 1 << 20))
def test_training_that_does_not_fit_is_refused_with_what_would(batch: int) -> None:
    gpu, least = GpuMemory(24 * GIB, 20 * GIB), 128
    try:
        make_plan(gpu, 0.9, PROFILE, Work(2048, batch, 4), page_bytes=PAGE, least=least)
    except ConfigError as error:
        assert error.field == "micro_batch_tokens"
        most = int(error.message.split("at most ")[1].split(" ")[0])
    else:
        assume(False)
    assert make_plan(gpu, 0.9, PROFILE, Work(2048, most, 4), page_bytes=PAGE, least=least)
    with pytest.raises(ConfigError):
        make_plan(gpu, 0.9, PROFILE, Work(2048, most + 2, 4), page_bytes=PAGE, least=least)


def test_too_many_jobs_are_named() -> None:
    with pytest.raises(ConfigError, match="max_active_jobs") as caught:
        make_plan(GpuMemory(24 * GIB, 20 * GIB), 0.9, PROFILE, Work(2048, 16, 40), page_bytes=PAGE, least=128)
    assert caught.value.field == "micro_batch_tokens"


def test_a_base_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_fraction") as caught:
        make_plan(GpuMemory(24 * GIB, 5 * GIB), 0.9, PROFILE, WORK, page_bytes=PAGE, least=128)
    assert caught.value.field == "memory_fraction"


def test_recurrent_states_take_their_bytes_from_the_pool_and_may_not_fit() -> None:
    gpu = GpuMemory(140 * GIB, 124 * GIB)
    without = make_plan(gpu, 0.9, PROFILE, WORK, page_bytes=PAGE, least=128)
    plan = make_plan(gpu, 0.9, PROFILE, WORK, page_bytes=PAGE, least=128, states=12 * GIB)
    assert without.pages - plan.pages == 12 * GIB // PAGE
    assert plan.set_aside == without.set_aside
    assert "recurrent states 12.00 GiB" in plan.note(16)
    with pytest.raises(ConfigError, match="the recurrent states of so many sequences") as error:
        make_plan(gpu, 0.9, PROFILE, WORK, page_bytes=PAGE, least=128, states=200 * GIB)
    assert error.value.field == "max_running"
