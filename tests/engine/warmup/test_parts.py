"""The order of a warm-up's parts: each runs once, after those whose results it uses, whatever fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coserve.engine.warmup.parts import GEMM_ROWS, GEMMS, LAYERS, Part, PartSchedule, all_parts, gpu_of, units
from coserve.kernels.gemm import skinny

Case = tuple[list[Part], set[str]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Parts that follow earlier ones, and the names of some that are already complete."""
    parts: list[Part] = []
    for number in range(draw(st.integers(1, 8))):
        known = [part.name for part in parts]
        earlier = st.frozensets(st.sampled_from(known)) if known else st.just(frozenset[str]())
        parts.append(Part(f"p{number}", draw(st.integers(1, 9)), draw(earlier)))
    return parts, draw(st.sets(st.sampled_from([part.name for part in parts])))


@given(cases(), st.data())
def test_each_part_runs_once_after_those_before_it(case: Case, data: st.DataObject) -> None:
    parts, before = case
    schedule, running, begun = PartSchedule(parts, before), list[str](), list[str]()
    by_name = {part.name: part for part in parts}
    last = schedule.progress
    while not schedule.ended:
        name = schedule.next()
        if name is not None:
            assert by_name[name].after <= schedule.complete | schedule.failed.keys()
            running.append(name)
            begun.append(name)
        else:
            assert running, "nothing runs and nothing may start"
        if name is None or data.draw(st.booleans()):
            ends = running.pop(data.draw(st.integers(0, len(running) - 1)))
            schedule.advance(ends, data.draw(st.integers(0, 10)), 10)
            assert schedule.progress[0] < schedule.progress[1]
            why = data.draw(st.none() | st.just("why"))
            schedule.finish(ends, why, for_good=data.draw(st.booleans()))
        done, total = schedule.progress
        assert last[0] <= done <= total
        last = done, total
    assert schedule.progress[0] == schedule.progress[1]
    assert len(begun) == len(set(begun))
    assert schedule.complete | schedule.failed.keys() == by_name.keys()
    assert not set(begun) & before


def test_a_part_that_is_put_back_runs_again() -> None:
    schedule = PartSchedule([Part("one", 3)])
    assert schedule.next() == "one"
    assert schedule.next() is None
    schedule.put_back("one")
    assert schedule.next() == "one"


def test_graphs_wait_for_the_layers_and_the_choice_of_gemms() -> None:
    schedule = PartSchedule(all_parts())
    started = list(iter(schedule.next, None))
    assert {LAYERS, *GEMMS} == set(started[: len(GEMMS) + 1])
    assert not any(name.startswith(("graphs", "mixed")) for name in started)
    for name in started:
        schedule.finish(name, "refused" if name == GEMMS[0] else None)
    assert {"graphs-0", "graphs-256", "mixed-16"} <= set(iter(schedule.next, None)), "torch's GEMMs run where ours fail"


def test_layers_are_compiled_for_each_gpu() -> None:
    alone, shared = ([part.name for part in all_parts(ranks)] for ranks in (1, 4))
    assert set(shared) - set(alone) == {"gpu-1", "gpu-2", "gpu-3"}
    assert [gpu_of(name) for name in ("gpu-3", *alone)] == [3] + [0] * len(alone)
    assert units(4) > units(1) > len(alone)


def test_parts_know_the_rows_that_kernels_are_made_for() -> None:
    """Written twice: the process that orders the parts imports no torch."""
    assert (1, *skinny.ROWS) == GEMM_ROWS
