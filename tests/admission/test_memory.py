"""A job starts, waits or is refused by its memory; what other processes take is noticed, and what they give back
too."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from coserve.admission.memory import READINGS, Hold, HostAdmission, MemoryAdmission, Start, check_fits, too_large
from coserve.admission.micro_batch import MOST_SHAPES, padded
from coserve.admission.recompute_plan import Option, RecomputePlan, host_bytes, job_memory, shared_bytes
from coserve.admission.shapes import flat_elements, job_state_bytes, lora_shapes
from coserve.core.errors import BY_CODE, JobTooLarge
from coserve.core.gpu_memory import GIB, LinearBytes, MemoryModel
from coserve.core.training.jobs import JobSpec
from coserve.core.training.settings import DpoLoss, Optimizer, TrainingSettings
from coserve.core.types import AdapterRef, LoraSettings
from tests.support.gpu_memory import BASE, COSTS
from tests.support.records import make_spec

LIMIT = 4096


def spec(id: str = "one", rank: int = 16, *, longest: int = 256, tokens: int = 1 << 20, **training: object) -> JobSpec:
    settings = TrainingSettings(batch_tokens=8192, steps=3)
    return msgspec.structs.replace(
        make_spec(id),
        lora=LoraSettings(r=rank),
        training=msgspec.structs.replace(settings, **training),
        tokens=tokens,
        target_tokens=tokens // 2,
        longest=longest,
    )


def needs(job: JobSpec) -> tuple[int, list[tuple[RecomputePlan, int]]]:
    memory = job_memory(job, BASE, MemoryModel(costs=COSTS, training=GIB), LIMIT)
    return memory.state.total, [(option.recompute_plan, option.activations) for option in memory.options]


def admission(training: int) -> MemoryAdmission:
    return MemoryAdmission(MemoryModel(costs=COSTS, training=training), BASE, LIMIT)


def test_recompute_plans_go_from_the_fastest_to_the_smallest() -> None:
    _, options = needs(spec())
    recompute_plans = [option for option, _ in options]
    assert recompute_plans[:5] == [
        RecomputePlan(4096),
        RecomputePlan(2048),
        *(RecomputePlan(2048, layers) for layers in (1, 2, 3)),
    ]
    assert recompute_plans[-1].tokens == 256 and recompute_plans[-1].recomputed
    times = [option.time(BASE.layers) for option, _ in options]
    assert times == sorted(times)
    sizes = [size for _, size in options]
    assert sizes == sorted(set(sizes), reverse=True), "each takes less than all faster ones"
    assert {recompute_plan.tokens for recompute_plan, _ in needs(spec(longest=3000))[1]} == {4096, 3000}
    assert needs(spec(tokens=700, longest=700))[1][0][0].tokens == 700, "there are no more"
    assert needs(spec(batch_tokens=600))[1][0][0].tokens == 600 + 256, "a step has one row more at most"


def test_a_job_that_fits_only_otherwise_is_told_how() -> None:
    state, options = needs(spec())
    found = admission(state + options[0][1]).admit(spec())
    assert found == Start(RecomputePlan(4096))
    smaller = admission(state + options[1][1]).admit(spec())
    assert isinstance(smaller, Start)
    assert smaller.recompute_plan == RecomputePlan(2048)
    assert smaller.note is not None
    assert "at most 2048 tokens at once" in smaller.note
    assert f"{state + options[0][1]} bytes" in smaller.note
    least = admission(state + options[-1][1]).admit(spec())
    assert isinstance(least, Start)
    assert least.recompute_plan == options[-1][0] == RecomputePlan(256, recomputed=3)
    assert "recomputes 3 of 4 layers" in (least.note or "")


def test_a_job_that_never_fits_is_refused_with_both_numbers() -> None:
    state, options = needs(spec(rank=256))
    least, limit = state + options[-1][1], state + options[-1][1] - 1
    model = MemoryModel(costs=COSTS, training=limit)
    for refuse in (
        lambda: check_fits(spec(rank=256), BASE, model, LIMIT),
        lambda: MemoryAdmission(model, BASE, LIMIT).admit(spec(rank=256)),
    ):
        with pytest.raises(JobTooLarge, match=f"at most {limit} bytes.*got one of at least {least}") as caught:
            refuse()
        assert (caught.value.status, caught.value.field) == (422, "lora")
    assert BY_CODE["job_too_large"] is JobTooLarge
    check_fits(spec(rank=16), BASE, model, LIMIT)


@pytest.mark.parametrize(
    ("recompute_plan", "said"),
    [
        (RecomputePlan(256, recomputed=3), "for a micro-batch of 256 tokens that recomputes 3 layers; try"),
        (RecomputePlan(256, recomputed=1), "for a micro-batch of 256 tokens that recomputes 1 layer; try"),
        (RecomputePlan(1), "for a micro-batch of 1 token; try"),
    ],
)
def test_a_refusal_counts_tokens_and_layers_in_words(recompute_plan: RecomputePlan, said: str) -> None:
    memory = job_memory(spec(), BASE, MemoryModel(costs=COSTS, training=GIB), LIMIT)
    only = replace(memory, options=(Option(recompute_plan, activations=1),))
    assert said in str(too_large(only, planned=GIB))


def test_paged_moments_are_in_host_memory() -> None:
    """On the GPU there are three buffers of 2^20 weights; host memory has two copies of them and one of what else is
    kept, in blocks that are powers of two."""
    model = MemoryModel(costs=COSTS, training=GIB)
    plain, one = (
        job_memory(spec(rank=64, optimizer=kind), BASE, model, LIMIT)
        for kind in (Optimizer.ADAMW, Optimizer.PAGED_ADAMW)
    )
    size = plain.state.gradients // 4
    assert one.state.optimizer == plain.state.optimizer - 8 * size + 3 * (8 << 20)
    last = size % (1 << 23)
    row = 4 * (size - last) + (1 << (4 * last - 1).bit_length())
    assert (plain.pinned, one.pinned) == (3 * row, 5 * row)
    start = 4 * sum(sum(shape.parts) for shape in plain.shapes)
    assert (plain.host, one.host) == (3 * row + start, 5 * row + start), "with the weights that it starts with"
    assert (one.state.adapter, one.state.gradients) == (plain.state.adapter, plain.state.gradients)


def test_graphs_of_ranks_are_counted() -> None:
    """The costs of their compiled layers are not measured; the graphs' static tensors are there all the same, of as
    many tokens as a graph has."""
    model = MemoryModel(costs=COSTS, training=GIB, ranks=2)
    graphed = msgspec.structs.replace(model, graphs=True)
    plain, graphs = (job_memory(spec(), BASE, each, LIMIT).options[0] for each in (model, graphed))
    static = 3 * MOST_SHAPES * padded(plain.recompute_plan.tokens) * BASE.hidden * 2
    assert graphs.recompute_plan == plain.recompute_plan and graphs.activations - plain.activations >= static
    dropout = msgspec.structs.replace(spec(), lora=LoraSettings(r=16, dropout=0.1))
    assert job_memory(dropout, BASE, graphed, LIMIT) == job_memory(dropout, BASE, model, LIMIT), "it has no graphs"


def test_jobs_wait_for_pinned_memory_and_are_refused_where_it_never_is_enough() -> None:
    jobs = [spec(id, 64, optimizer=Optimizer.PAGED_LION) for id in ("one", "two")]
    model = MemoryModel(costs=COSTS, training=64 * GIB)
    alone = job_memory(jobs[0], BASE, model, LIMIT)
    pinned, host = alone.pinned, alone.host
    model = msgspec.structs.replace(model, pinned=2 * host - 1)
    memory = MemoryAdmission(model, BASE, LIMIT)
    assert isinstance(memory.admit(jobs[0]), Start)
    held = memory.admit(jobs[1])
    assert isinstance(held, Hold) and held.cause == "jobs"
    assert f"takes {2 * host} bytes of the {2 * host - 1} for it" in held.message
    assert memory.admit(jobs[1]) is held, "computed once"
    assert isinstance(memory.admit(spec("three", 16)), Start), "a smaller one does not wait"
    memory.release("three")
    assert [use.pinned for use in memory.each] == [pinned]
    memory.release("one")
    assert isinstance(memory.admit(jobs[1]), Start)
    less = msgspec.structs.replace(model, pinned=host - 1)
    for refuse in (
        lambda: check_fits(jobs[0], BASE, less, LIMIT),
        lambda: MemoryAdmission(less, BASE, LIMIT).admit(jobs[0]),
    ):
        said = f"at most {host - 1} bytes of host memory.*got {host}: 1 are missing;"
        with pytest.raises(JobTooLarge, match=said) as caught:
            refuse()
        assert caught.value.field == "training.optimizer"
    check_fits(spec(rank=16), BASE, less, LIMIT)


def test_host_memory_alone_admits_jobs_where_the_gpu_s_is_not_planned() -> None:
    def needs(job: JobSpec) -> int:
        return host_bytes(job, BASE, ranks=1, fully_sharded=False)

    size = needs(spec())
    assert size == job_memory(spec(), BASE, MemoryModel(costs=COSTS, training=GIB), LIMIT).host
    asked = list[str]()
    memory = HostAdmission(lambda own: asked.append(own.id) or needs(own), 2 * size)
    assert memory.admit(spec("one")) == memory.admit(spec("two")) == Start()
    held = memory.admit(spec("three"))
    assert memory.admit(spec("three")) == held and asked == ["one", "two", "three"], "computed once"
    assert isinstance(held, Hold) and f"takes {3 * size} bytes of the {2 * size} for it" in held.message
    memory.release("one")
    assert memory.admit(spec("three")) == Start()
    with pytest.raises(JobTooLarge, match=f"got {size}: 1 are missing;"):
        HostAdmission(needs, size - 1).admit(spec())
    assert HostAdmission().admit(spec(rank=256)) == Start()


def test_on_a_cpu_host_memory_has_the_state_of_a_job_beside_its_copies() -> None:
    on_cpu = msgspec.structs.replace(BASE, device="cpu")
    for ranks in (1, 2):
        model = MemoryModel(costs=COSTS, training=GIB, ranks=ranks)
        memory = job_memory(spec(), BASE, model, LIMIT)
        on_ranks = memory.pinned + ranks * memory.state.total
        assert host_bytes(spec(), on_cpu, ranks=ranks, fully_sharded=False) == on_ranks


def test_a_second_job_waits_until_the_first_ends() -> None:
    state, options = needs(spec(rank=64))
    memory = admission(state + options[0][1] + state // 2)
    assert isinstance(memory.admit(spec("one", 64)), Start)
    found = memory.admit(spec("two", 64))
    assert isinstance(found, Hold)
    assert found.cause == "jobs"
    assert "waiting for memory" in found.message
    assert memory.admit(spec("two", 64)) is found, "computed once"
    memory.release("one")
    assert isinstance(memory.admit(spec("two", 64)), Start)
    assert [use.id for use in memory.each] == ["two"]


def test_what_another_process_takes_is_noticed_and_survived() -> None:
    state, options = needs(spec())
    planned = state + options[0][1]
    memory = admission(planned)
    memory.available(planned + GIB, 0.0)
    assert memory.admit(spec()) == Start(options[0][0])
    memory.available(planned + GIB // 4, 1.0)
    assert memory.limit < planned, "the margin is kept"
    assert f"{memory.limit} of {planned} bytes are left" in memory.troubles[0]
    ((job, lowered),) = memory.changes()
    assert job == "one"
    assert lowered.recompute_plan is not None
    assert lowered.recompute_plan.tokens < 4096
    assert memory.changes() == []
    held = memory.admit(spec("two"))
    assert isinstance(held, Hold)
    for reading in range(2 * READINGS):
        memory.available(planned + GIB, 2 + reading / (2 * READINGS))
    for second in range(3, READINGS + 1):
        memory.available(planned + GIB, second)
        assert memory.changes() == [], "it may come again at once"
    memory.available(planned + GIB, READINGS + 1)
    ((job, lifted),) = memory.changes()
    assert (job, lifted.recompute_plan) == ("one", options[0][0])
    assert "trains on 4096 tokens" in (lifted.note or "")
    assert (memory.limit, memory.troubles) == (planned, ())


def test_jobs_are_planned_anew_for_compiled_layers_and_for_their_own_again() -> None:
    """Those that cannot run compiled ones stay as they are."""
    state, _ = needs(spec())
    lean, heavy = (
        msgspec.structs.replace(COSTS, layer=layer, recompute=LinearBytes(fixed=0.0, per_token=100.0))
        for layer in (3000.0, 30000.0)
    )
    model = MemoryModel(costs=heavy, training=GIB, compiled=lean)
    fitting = job_memory(spec(), BASE, model, LIMIT).options[0].activations
    memory = MemoryAdmission(MemoryModel(costs=heavy, training=2 * state + fitting), BASE, LIMIT)
    dropping = spec("dropping")
    dropping = msgspec.structs.replace(dropping, lora=LoraSettings(r=16, dropout=0.1))
    before = [memory.admit(job) for job in (spec(), dropping)]
    limited = [one.recompute_plan for one in before if isinstance(one, Start) and one.note is not None]
    assert len(limited) == 2 and memory.changes() == []
    memory.compiled(lean)
    ((job, lifted),) = memory.changes()
    assert (job, lifted.recompute_plan) == ("one", RecomputePlan(4096, compiled=True))
    assert "trains on 4096 tokens" in (lifted.note or "")
    memory.compiled(lean)
    assert memory.changes() == []
    memory.compiled(None)
    ((job, lowered),) = memory.changes()
    assert (job, lowered.recompute_plan) == ("one", limited[0])
    assert "at once" in (lowered.note or "")


def test_a_job_that_waits_for_other_processes_is_told_so() -> None:
    state, options = needs(spec())
    memory = admission(state + options[0][1])
    memory.available(memory.limit, 0.0)
    memory.available(state, 0.1)
    found = memory.admit(spec())
    assert isinstance(found, Hold)
    assert found.cause == "others"


def test_an_operator_who_leaves_nothing_free_has_no_trouble() -> None:
    memory = admission(GIB)
    memory.available(GIB + 5, 0.0)
    assert (memory.limit, memory.troubles) == (GIB, ())


def test_what_a_job_keeps() -> None:
    shapes = lora_shapes(LoraSettings(r=8, targets=("q_proj",)), BASE)
    assert [(shape.layer, shape.rank, shape.a, shape.b) for shape in shapes] == [(i, 8, 8192, 8192) for i in range(4)]
    size = 4 * 2 * 8192
    state = job_state_bytes(shapes, "bfloat16", early_stopping=True)
    assert (state.adapter, state.gradients, state.optimizer) == (2 * size, 4 * size, 16 * size + 512)
    taught = job_state_bytes(shapes, "bfloat16", early_stopping=False, compared=shapes)
    assert (taught.adapter, taught.optimizer) == (4 * size, 12 * size + 512)
    assert flat_elements([1, 1]) == 128
    assert flat_elements([(1 << 23) - 64, 128]) == (1 << 23) + 128, "no tensor lies across two blocks"


def test_a_preference_that_continues_an_adapter_keeps_a_copy_of_its_start() -> None:
    def kept(loss: DpoLoss | None, init_from: AdapterRef | None) -> int:
        return needs(msgspec.structs.replace(spec(loss=loss), init_from=init_from))[0]

    start, loss = AdapterRef("start", 1), DpoLoss()
    copy = sum(2 * (shape.a + shape.b) for shape in lora_shapes(LoraSettings(r=16), BASE))
    assert kept(loss, start) == kept(None, start) + copy
    assert kept(loss, None) == kept(DpoLoss(reference="base"), start) == kept(None, start)


def test_one_rank_keeps_its_part() -> None:
    settings = LoraSettings(r=8, targets=("q_proj", "o_proj"))
    whole, half = lora_shapes(settings, BASE), lora_shapes(settings, BASE, ranks=2)
    parts = {shape.role: (shape.a, shape.b) for shape in half}
    assert parts == {"self_attn.q_proj": (8192, 4096), "self_attn.o_proj": (4096, 8192)}
    assert {(shape.a, shape.b) for shape in whole} == {(8192, 8192)}
    blocks = lora_shapes(msgspec.structs.replace(settings, bd_blocks=2), BASE, ranks=2)
    assert {shape.role: (shape.a, shape.b) for shape in blocks} == {
        "self_attn.q_proj": (4096, 2048),
        "self_attn.o_proj": (2048, 4096),
    }
    sharded = lora_shapes(settings, BASE, ranks=2, fully_sharded=True)
    assert {(shape.a, shape.b) for shape in sharded} == {(4096, 4096)}


def test_jobs_share_as_many_tokens_as_fit_beside_what_all_of_them_keep() -> None:
    """A batch of several jobs takes at most what an adapter with every site of theirs and the largest rank takes."""
    jobs = [spec("one", 16, tokens=600), spec("two", 64, tokens=600), spec("three", 8, tokens=600)]
    states = sum(needs(job)[0] for job in jobs)
    whole = admission(1 << 40)
    assert all(isinstance(whole.admit(job), Start) for job in jobs)
    model = MemoryModel(costs=COSTS, training=GIB)
    memories = [job_memory(job, BASE, model, LIMIT) for job in jobs]
    shared = shared_bytes(model, BASE, memories, 1800)
    assert all(shared >= option.activations for memory in memories for option in memory.options[:1])
    assert whole.shared_tokens == LIMIT and whole.needed == states + shared
    for order in (memories, memories[::-1]):
        assert shared_bytes(model, BASE, order, 1800) == shared_bytes(model, BASE, [memories[1]], 1800)
    assert shared > shared_bytes(model, BASE, [memories[0]], 1800)
    tight = admission(states + shared - 1)
    assert all(isinstance(tight.admit(job), Start) for job in jobs)
    assert tight.shared_tokens == 1024, "less than what all of them ask for"
    assert tight.needed <= tight.limit
    tight.release("two")
    assert tight.shared_tokens == LIMIT
