"""The order of a warm-up's parts: each runs once, after those that it requires, whatever fails."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coserve.generate.execution.graph_sizes import LORA_RANKS
from coserve.kernels.gemm import skinny
from coserve.warmup.parts import (
    EAGER,
    FIRST,
    GEMM_ROWS,
    GEMMS,
    LAYERS,
    PROFILE,
    RANKS,
    SLOT_KERNELS,
    TRAINING_LAYERS,
    TRAINING_LEVELS,
    Part,
    PartSchedule,
    all_parts,
    blocks,
    gpu_of,
    graphs,
    training,
)

Case = tuple[list[Part], set[str]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Parts that require or follow earlier ones, and the names of some that are already complete."""
    parts: list[Part] = []
    for number in range(draw(st.integers(1, 8))):
        known = [part.name for part in parts]
        earlier = st.frozensets(st.sampled_from(known)) if known else st.just(frozenset[str]())
        urgent = draw(st.booleans())
        parts.append(Part(f"p{number}", draw(st.integers(1, 9)), draw(earlier), draw(earlier), urgent=urgent))
    done = draw(st.sets(st.sampled_from([part.name for part in parts])))
    return parts, done


@given(cases(), st.data())
def test_each_part_runs_once_after_those_it_requires(case: Case, data: st.DataObject) -> None:
    parts, before = case
    schedule, running, begun = PartSchedule(parts, before), list[str](), list[str]()
    by_name = {part.name: part for part in parts}
    last = schedule.progress
    while not schedule.ended:
        name = schedule.next()
        if name is not None:
            assert by_name[name].requires <= schedule.complete
            assert by_name[name].after <= schedule.complete | schedule.failed.keys()
            running.append(name)
            begun.append(name)
        else:
            assert running, "nothing runs and nothing may start"
        if name is None or data.draw(st.booleans()):
            ends = running.pop(data.draw(st.integers(0, len(running) - 1)))
            match data.draw(st.sampled_from(["finish", "advance", "fail"])):
                case "fail":
                    schedule.fail(ends, "why")
                case "advance":
                    schedule.advance(ends, data.draw(st.integers(0, 10)), 10)
                    running.append(ends)
                    assert schedule.progress[0] < schedule.progress[1]
                    schedule.finish(running.pop())
                case _:
                    schedule.finish(ends)
        done, total = schedule.progress
        assert last[0] <= done <= total
        last = done, total
    assert schedule.progress[0] == schedule.progress[1]
    assert len(begun) == len(set(begun))
    assert schedule.complete | schedule.failed.keys() == {part.name for part in parts}
    assert not set(begun) & before


def test_a_part_that_is_put_back_runs_again() -> None:
    schedule = PartSchedule([Part("one", 3)])
    assert schedule.next() == "one"
    assert schedule.next() is None
    schedule.put_back("one")
    assert schedule.next() == "one"


def test_what_requires_a_failed_part_fails_too() -> None:
    schedule = PartSchedule(all_parts())
    started = set(iter(schedule.next, None))
    assert started == {PROFILE, LAYERS, SLOT_KERNELS, *GEMMS, "prompts-16", "steps"}, (
        "what the engine needs first waits for the layers, and all else for that"
    )
    schedule.fail(LAYERS, "refused")
    assert {*graphs(0), *graphs(16), *graphs(256)} <= schedule.failed.keys()
    assert set(schedule.failed.values()) == {"refused"}


def test_graphs_are_compiled_with_torchs_gemms_where_ours_could_not_be_measured() -> None:
    schedule = PartSchedule(all_parts())
    started = list(iter(schedule.next, None))
    for name in started:
        if name == GEMMS[0]:
            schedule.fail(name, "refused")
        else:
            schedule.finish(name)
    assert schedule.failed.keys() == {GEMMS[0]}
    assert {*graphs(0), *graphs(16)} <= set(iter(schedule.next, None))


def test_layers_that_keep_less_come_after_all_that_first_jobs_need() -> None:
    parts = {part.name: part for part in all_parts()}
    names = [*parts]
    first = (TRAINING_LAYERS, training(16), "decodes-16", "sites-16")
    assert max(map(names.index, first)) < names.index(TRAINING_LEVELS)
    assert parts[TRAINING_LEVELS].requires == {TRAINING_LAYERS}, "their costs are those of all layers, and more"
    schedule = PartSchedule(all_parts(), [name for name in names if name not in (TRAINING_LEVELS, training(16))])
    assert schedule.next() == training(16)
    assert schedule.next() is None, "two processes would compile the same kernels"
    schedule.finish(training(16))
    assert schedule.next() == TRAINING_LEVELS


def test_layers_are_compiled_for_each_gpu_and_kernels_for_blocks_last() -> None:
    alone, shared = ([part.name for part in all_parts(ranks)] for ranks in (1, 4))
    assert set(shared) - set(alone) == {"gpu-1", "gpu-2", "gpu-3"}
    assert [gpu_of(name) for name in ("gpu-3", *alone)] == [3] + [0] * len(alone)
    assert alone[-len(RANKS) :] == shared[-len(RANKS) :] == [blocks(rank) for rank in RANKS]
    assert blocks(17) == "blocks-32"


def test_parts_know_the_ranks_and_rows_that_kernels_are_made_for() -> None:
    """Written twice: the process that orders the parts imports no torch."""
    assert RANKS == LORA_RANKS
    assert (1, *skinny.ROWS) == GEMM_ROWS


def test_the_engine_gets_first_what_it_needs_first() -> None:
    names = [part.name for part in all_parts()]
    assert set(names[: len(FIRST) + len(GEMMS) + 4]) == {*FIRST, LAYERS, SLOT_KERNELS, *GEMMS, "prompts-16", "steps"}
    assert max(map(names.index, (*EAGER, training(16)))) < min(
        names.index(name) for name in names if name.endswith("-32") and "gemms" not in name
    )
