"""A job gets the recompute plan that costs the least time of all that fit: sizes of micro-batches, and what each layer
keeps."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.admission.memory import MemoryAdmission, Start
from coserve.admission.micro_batch import MicroBatchShape, lora_layers, micro_batch_bytes, padded
from coserve.admission.recompute_plan import RECOMPUTE_OVERHEAD, Overheads, RecomputePlan, job_memory
from coserve.admission.shapes import lora_shapes
from coserve.core.gpu_memory import Kept, LayerTime, LevelCosts, LinearBytes, MemoryModel, TrainingCosts
from coserve.core.training.jobs import JobSpec
from coserve.core.training.settings import TrainingSettings
from coserve.core.types import LoraSettings
from tests.support.examples import examples
from tests.support.gpu_memory import BASE, COSTS
from tests.support.records import make_spec

GIB, LIMIT = 1 << 30, 4096
INPUT = 2 * BASE.hidden


def spec(
    rank: int = 16, *, targets: tuple[str, ...] | None = None, tokens: int = 1 << 20, longest: int = 700
) -> JobSpec:
    return msgspec.structs.replace(
        make_spec("one"),
        lora=LoraSettings(r=rank, targets=targets),
        tokens=tokens,
        rows=tokens // 300,
        training=TrainingSettings(batch_tokens=8192, steps=3),
        target_tokens=tokens // 2,
        longest=longest,
    )


def level(kept: float, backward: float, time: LayerTime) -> LevelCosts:
    return LevelCosts(
        kept=kept, shrinks=(False, False, False, True), backward=LinearBytes(fixed=0.0, per_token=backward), time=time
    )


def costs(attention: LevelCosts, input: LevelCosts) -> TrainingCosts:
    """A layer that keeps all takes 1000 ns a token, whatever the length of rows."""
    time = LayerTime(fixed=1000.0, per_row_token=0.0)
    return msgspec.structs.replace(COSTS, time=time, levels={Kept.ATTENTION: attention, Kept.INPUT: input})


def measured(attention: float = 1200.0, per_row: float = 0.2) -> TrainingCosts:
    """Attention takes `per_row` ns a token for each token of the row."""
    return costs(
        level(2 * INPUT, 9500.0, LayerTime(fixed=attention, per_row_token=0.0)),
        level(INPUT, 9700.0, LayerTime(fixed=attention, per_row_token=per_row)),
    )


def fits(job: JobSpec, model: TrainingCosts, recompute_plan: RecomputePlan) -> int:
    layers = lora_layers(model, lora_shapes(job.lora, BASE), BASE.dtype, dropout=False)
    tokens = recompute_plan.tokens
    batch = MicroBatchShape(
        padded(tokens), min(tokens, job.target_tokens), recompute_plan.recomputed, recompute_plan.partly, graphs=True
    )
    return micro_batch_bytes(model, BASE, layers, batch).peak


TIMES = st.builds(LayerTime, fixed=st.floats(900, 2000), per_row_token=st.floats(0, 1))
LEVELS = st.builds(level, st.floats(1000, 9000), st.floats(500, 20000), TIMES)


@settings(max_examples=examples(40))
@given(
    LEVELS,
    LEVELS,
    st.sampled_from([None, ("down_proj",), ("q_proj", "o_proj")]),
    st.sampled_from([8, 256]),
    st.floats(0, 1.1),
)
def test_the_choice_is_the_one_of_least_time_that_fits(
    attention: LevelCosts, input: LevelCosts, targets: tuple[str, ...] | None, rank: int, share: float
) -> None:
    model, job = costs(attention, input), spec(rank, targets=targets)
    memory = job_memory(job, BASE, MemoryModel(costs=COSTS, training=GIB, compiled=model), LIMIT)
    overheads = Overheads.of(model, job.tokens / job.rows)
    every = [
        RecomputePlan(tokens, recomputed, partly, compiled=True)
        for tokens in (4096, 2048, 1024, 700)
        for recomputed in range(BASE.layers + 1)
        for partly in range(BASE.layers + 1 - recomputed)
    ]
    needed = {one: fits(job, model, one) for one in every}
    limit = round(min(needed.values()) + share * (max(needed.values()) - min(needed.values())))
    least = min(one.time(BASE.layers, overheads) for one, size in needed.items() if size <= limit)
    found = memory.best(limit)
    assert found is not None and found.activations == needed[found.recompute_plan] <= limit
    assert found.recompute_plan.time(BASE.layers, overheads) == pytest.approx(least, rel=1e-12)
    assert memory.best(min(needed.values()) - 1) is None


@pytest.mark.parametrize(("row", "recomputed", "partly"), [(100, 2, 0), (4000, 0, 3)])
def test_long_rows_make_attention_worth_its_bytes(row: int, recomputed: int, partly: int) -> None:
    """With short rows attention is computed again for less than other layers' products; with long ones it is kept."""
    model, job = measured(per_row=0.1), msgspec.structs.replace(spec(longest=4000), rows=(1 << 20) // row)
    memory = job_memory(job, BASE, MemoryModel(costs=COSTS, training=GIB, compiled=model), LIMIT)
    found = memory.best(fits(job, model, RecomputePlan(4096, recomputed=2, compiled=True)))
    assert found is not None and found.recompute_plan == RecomputePlan(4096, recomputed, partly, compiled=True)


def test_nothing_is_recomputed_where_everything_fits() -> None:
    memory = job_memory(spec(), BASE, MemoryModel(costs=COSTS, training=GIB, compiled=measured()), LIMIT)
    assert memory.options[0].recompute_plan == RecomputePlan(4096, compiled=True)


def test_overheads_are_those_measured_and_never_below_none() -> None:
    model = measured(attention=1100.0, per_row=0.5)
    assert Overheads.of(model, 200.0) == Overheads(recomputed=pytest.approx(0.2), partly=pytest.approx(0.1))
    faster = measured(attention=900.0, per_row=0.0)
    assert Overheads.of(faster, 200.0) == Overheads(recomputed=0.0, partly=0.0), "a measurement may be noisy"
    assert Overheads.of(COSTS, 200.0) == Overheads(recomputed=RECOMPUTE_OVERHEAD, partly=RECOMPUTE_OVERHEAD)


def test_a_job_without_compiled_layers_keeps_all_or_nothing_of_a_layer() -> None:
    model = MemoryModel(costs=COSTS, training=GIB, compiled=measured())
    dropping = msgspec.structs.replace(spec(), lora=LoraSettings(r=16, dropout=0.1))
    options = job_memory(dropping, BASE, model, LIMIT).options
    assert {option.recompute_plan.partly for option in options} == {0}
    forced = msgspec.structs.replace(model, recompute=True)
    recompute_plans = [option.recompute_plan for option in job_memory(spec(), BASE, forced, LIMIT).options]
    assert {(one.recomputed, one.partly) for one in recompute_plans} == {(BASE.layers, 0)}


def test_a_job_is_told_what_is_computed_again() -> None:
    """In its notes, and by `coserve memory`."""
    model, job = measured(), msgspec.structs.replace(spec(longest=4000), rows=300)
    memory = job_memory(job, BASE, MemoryModel(costs=COSTS, training=GIB, compiled=model), LIMIT)
    partly = next(one for one in memory.options if one.recompute_plan.partly and not one.recompute_plan.recomputed)
    both = next(one for one in memory.options if one.recompute_plan.partly and one.recompute_plan.recomputed)
    for option, said in (
        (partly, f"recomputes {partly.recompute_plan.partly} of 4 layers but for attention in the backward"),
        (
            both,
            (
                f"recomputes {both.recompute_plan.recomputed} of 4 layers, and "
                f"{both.recompute_plan.partly} more but for attention, in the backward"
            ),
        ),
    ):
        limit = memory.state.total + option.activations
        admission = MemoryAdmission(MemoryModel(costs=COSTS, training=limit, compiled=model), BASE, LIMIT)
        found = admission.admit(job)
        assert isinstance(found, Start) and found.recompute_plan == option.recompute_plan
        assert said in (found.note or "")
        (use,) = admission.each
        assert (use.recomputed_layers, use.partly_recomputed_layers) == (
            option.recompute_plan.recomputed,
            option.recompute_plan.partly,
        )


def test_levels_that_are_there_later_change_what_a_job_recomputes() -> None:
    """Without them a layer runs its whole forward again."""
    job, before = spec(), msgspec.structs.replace(measured(), time=None, levels={})
    memory = job_memory(job, BASE, MemoryModel(costs=COSTS, training=GIB, compiled=before), LIMIT)
    option = next(one for one in memory.options if one.recompute_plan.recomputed)
    limit = memory.state.total + option.activations
    admission = MemoryAdmission(MemoryModel(costs=COSTS, training=limit, compiled=before), BASE, LIMIT)
    first = admission.admit(job)
    assert isinstance(first, Start) and first.recompute_plan == option.recompute_plan
    later = measured(attention=1010.0)
    admission.compiled(later)
    ((_, second),) = admission.changes()
    assert second.recompute_plan is not None and second.recompute_plan != first.recompute_plan
    overheads = Overheads.of(later, job.tokens / job.rows)
    assert second.recompute_plan.time(BASE.layers, overheads) < first.recompute_plan.time(BASE.layers)


def test_what_graphs_of_all_shapes_keep_is_counted() -> None:
    """The input, the output and a gradient of each, also while a batch of another shape runs."""
    job, tokens = spec(), 1024
    layers = lora_layers(COSTS, lora_shapes(job.lora, BASE), BASE.dtype, dropout=False)
    plain, graphed = (
        micro_batch_bytes(COSTS, BASE, layers, MicroBatchShape(tokens, tokens, graphs=graphs)).kept
        for graphs in (False, True)
    )
    assert graphed - plain == 6 * 3 * tokens * INPUT
