"""Jobs never need more than there is; each gets the fastest recompute plan that fits, and a waiting job changes nothing
for others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coserve.admission.ledger import Ledger, Shortage
from coserve.admission.recompute_plan import JobMemory, Option, RecomputePlan
from coserve.admission.shapes import JobStateBytes


def memory(state: int, *activations: int) -> JobMemory:
    """RecomputePlans of falling size: 1024, 512, ... tokens, the last with recomputation."""
    options = [
        Option(RecomputePlan(1024 >> i, recomputed=i == len(activations) - 1), size)
        for i, size in enumerate(activations)
    ]
    return JobMemory(JobStateBytes(state, 0, 0), 0, 0, tuple(options), (), dropout=False)


def test_a_job_gets_the_fastest_recompute_plan_that_fits() -> None:
    ledger = Ledger(100)
    option = ledger.admit("a", memory(20, 90, 70, 30))
    assert isinstance(option, Option)
    assert option.recompute_plan == RecomputePlan(512)


def test_activations_count_once_and_states_add_up() -> None:
    ledger = Ledger(100)
    for job in ("a", "b", "c"):
        assert isinstance(ledger.admit(job, memory(20, 40)), Option)
    assert (ledger.states, ledger.activations) == (60, 40)
    found = ledger.admit("d", memory(1, 1))
    assert found == Shortage(needed=101, limit=100, never=False)


def test_a_job_that_fits_later_starts_once_another_ends() -> None:
    ledger, large = Ledger(100), memory(50, 50)
    ledger.admit("a", memory(30, 30))
    assert isinstance(ledger.admit("b", large), Shortage)
    ledger.release("a")
    assert isinstance(ledger.admit("b", large), Option)


def test_a_job_that_never_fits_is_told_so_with_the_numbers() -> None:
    found = Ledger(100).admit("a", memory(60, 90, 50))
    assert found == Shortage(needed=110, limit=100, never=True)


def test_less_memory_lowers_recompute_plans_and_more_lifts_them_again() -> None:
    ledger = Ledger(100)
    ledger.admit("a", memory(20, 80, 40, 10))
    assert ledger.refit() == {}
    ledger.resize(65)
    assert {id: option.recompute_plan.tokens for id, option in ledger.refit().items()} == {"a": 512}
    ledger.resize(5)  # not even the smallest fits: it is tried all the same
    assert ledger.refit()["a"].recompute_plan.recomputed
    ledger.resize(1000)
    assert ledger.limit == 100, "never more than was planned"
    assert ledger.refit()["a"].recompute_plan.tokens == 1024


SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=4).map(lambda sizes: sorted(sizes, reverse=True))
EVENTS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40), SIZES, st.integers(30, 120)), max_size=40)


@given(EVENTS)
def test_what_was_admitted_fits(events: list[tuple[int, int, list[int], int]]) -> None:
    """While the limit is the planned one."""
    ledger, running = Ledger(100), set[int]()
    for job, state, sizes, _ in events:
        if job in running:
            ledger.release(str(job))
            running.discard(job)
        elif isinstance(ledger.admit(str(job), memory(state, *sizes)), Option):
            running.add(job)
        ledger.refit()
        assert ledger.states + ledger.activations <= 100
    assert set(ledger.each()) == set(map(str, running))


@given(EVENTS)
def test_a_refused_job_changes_nothing(events: list[tuple[int, int, list[int], int]]) -> None:
    ledger = Ledger(100)
    for number, (_, state, sizes, limit) in enumerate(events):
        ledger.resize(limit)
        ledger.refit()
        before, version = ledger.each(), ledger.version
        if isinstance(ledger.admit(str(number), memory(state, *sizes)), Shortage):
            assert (ledger.each(), ledger.version) == (before, version)
