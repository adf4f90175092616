"""The prefix cache changes what is computed and nothing else: tokens and log-probabilities keep every bit on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.core.link.generation import Generate, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, Slo
from coserve.generate.execution.eager import EagerExecutor, EagerStep
from coserve.generate.execution.interface import StepInFlight, StepInput, StepResult
from coserve.generate.generator import Generator
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.lora import LoraWeights
from tests.support.examples import by_day, examples
from tests.support.generation import make_generator, text
from tests.support.lengths import OneMoreToken
from tests.support.lora_backends import GROUPED
from tests.support.prefixes import REFS, request, run, shelf_of
from tests.support.tiny_models import tiny_model


def make(base: Base, *, cached: bool = True, **sizes: int) -> Generator:
    return make_generator(base, shelf_of(base), prefix_cache=cached, **({"page_tokens": 4} | sizes))


def llama() -> Base:
    return wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())


def shared_with_first(requests: list[Generate]) -> int:
    """Tokens, in whole pages of 4, that those behind the first of each adapter share with it; never the last one."""
    total = 0
    for ref in {one.adapter for one in requests}:
        first, *others = [one.prompt for one in requests if one.adapter == ref]
        for other in others:
            same = next((i for i, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), len(other))
            total += min(same, len(other) - 1) // 4 * 4
    return total


@pytest.mark.parametrize("family", by_day(["gpt2", "gemma2", "gemma3"], "gemma2"))
def test_a_hit_changes_no_bit(family: str) -> None:
    """Windows and softcaps too; one after another, side by side and in chunks, with an adapter and without."""
    base = wrap_base(tiny_model(family), name=family, eos_token_ids=())
    shared, adapters = text(45), (None, REFS[0])
    firsts = [request(f"{ref} first", shared + text(9, 1), ref) for ref in adapters]
    others = [request(f"{ref} {n}", shared[:n] + text(5, n), ref) for ref in adapters for n in (44, 43, 33, 3)]
    others += [request(f"{ref} whole", shared[:44], ref) for ref in adapters]
    plain = make(base, cached=False)
    expected = {one.id: run(plain, one)[one.id] for one in (*firsts, *others)}
    assert (plain.scheduler.active.prefix_queries, plain.scheduler.active.prefix_hits) == (0, 0)
    hits = shared_with_first([*firsts, *others])
    assert hits == 2 * (44 + 40 + 32 + 0 + 40)
    for gen, together in ((make(base), False), (make(base), True), (make(base, step_tokens=13), True)):
        got = run(gen, *firsts)
        for some in [others] if together else [[one] for one in others]:
            got |= run(gen, *some)
        assert got == expected
        assert gen.scheduler.active.prefix_hits == hits
        assert gen.scheduler.active.prefix_queries == sum(len(one.prompt) for one in (*firsts, *others))


class RecordingExecutor(EagerExecutor):
    """Keeps the last step."""

    last: StepInput

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> list[EagerStep]:
        self.last = step
        return super().launch(step, adapters)


def test_the_pages_of_a_hit_hold_what_would_have_been_computed() -> None:
    base, prompt = llama(), text(40)
    kept = []
    for cached in (True, False):
        kv = KvCache.for_base(base, 512, 4)
        executor = RecordingExecutor(base, kv, GROUPED)
        gen = Generator(base, shelf_of(base).store(), kv, executor, max_running=4, step_tokens=64, prefix_cache=cached)
        run(gen, request("first", (*prompt[:23], 5)))
        gen.add(request("second", prompt))
        gen.step()
        pages = torch.tensor(executor.last.sequences[0].run.pages)
        kept.append([each[pages].flatten(0, 1)[:40] for each in (*kv.views.keys, *kv.views.values)])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_nobody_hits_the_pages_of_another_version_adapter_or_salt() -> None:
    base, prompt = llama(), text(41)
    whose = [(None, ""), *((ref, "") for ref in REFS), (None, "tenant"), (REFS[0], "tenant")]
    requests = [request(f"{ref} {salt}", prompt, ref, salt=salt) for ref, salt in whose]
    plain = make(base, cached=False)
    expected = {one.id: run(plain, one)[one.id] for one in requests}
    assert len({str(tokens) for tokens, _ in expected.values()}) == 4
    gen = make(base)
    for one in requests:
        assert run(gen, one)[one.id] == expected[one.id]
        assert gen.scheduler.active.prefix_hits == 0, one.id
    for i, one in enumerate(requests):
        assert run(gen, one)[one.id] == expected[one.id]
        assert gen.scheduler.active.prefix_hits == 40 * (i + 1)


def test_an_answer_is_found_when_it_comes_back_as_part_of_a_prompt() -> None:
    gen = make(llama())
    tokens, _ = run(gen, request("question", text(10), max_tokens=31))["question"]
    follow_up = request("next", text(10) + tuple(tokens) + text(4, 9))
    expected = run(make(llama(), cached=False), follow_up)
    assert run(gen, follow_up) == expected
    assert gen.scheduler.active.prefix_hits == 40, "the last token of an answer is never computed, all before it are"


def test_those_that_run_side_by_side_hold_shared_pages_once() -> None:
    gen = make(llama())
    run(gen, request("first", text(41)))
    for i in range(5):
        gen.add(request(f"r{i}", text(40) + text(3, i)))
    gen.step()
    assert gen.pages_used == 10 + 5
    for i in range(5):
        gen.cancel(f"r{i}")
    assert gen.pages_used == 0


@dataclass(frozen=True)
class NoMemory:
    """A step that runs out of memory once it computes."""

    sequences: Sequence[int]
    overlaps: bool = False

    def collect(self) -> StepResult:
        raise torch.OutOfMemoryError


class Counting(EagerExecutor):
    """Counts tokens, and runs out of memory in the steps of these numbers: odd ones at the launch."""

    def __init__(self, base: Base, kv: KvCache, fails: Sequence[int] = ()) -> None:
        super().__init__(base, kv, GROUPED)
        self.tokens, self._fails = list[int](), fails

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> Sequence[StepInFlight]:  # type: ignore[override]
        number = len(self.tokens)
        self.tokens.append(sum(own.run.tokens for own in step.sequences))
        if number not in self._fails:
            return super().launch(step, adapters)
        if number % 2:
            raise torch.OutOfMemoryError
        return [NoMemory([own.sequence for own in step.sequences])]


@pytest.mark.parametrize("fails", [(), (0,), (0, 1)])
@pytest.mark.parametrize("ref", [None, REFS[0]])
def test_prompts_of_one_step_share_the_pages_that_it_writes(ref: AdapterRef | None, fails: tuple[int, ...]) -> None:
    """And read them only once they are written: if the step fails, they begin again."""
    base, shared = llama(), text(40)
    requests = [request(f"r{i}", shared + text(i, i), ref) for i in (1, 3, 0, 9, 1)]
    requests[-1] = msgspec.structs.replace(requests[-1], id="again")
    plain = make(base, cached=False)
    expected = {one.id: run(plain, one)[one.id] for one in requests}
    kv = KvCache.for_base(base, 2048, 4)
    executor = Counting(base, kv, fails)
    gen = Generator(base, shelf_of(base).store(), kv, executor, max_running=8, step_tokens=256, lengths=OneMoreToken())
    assert run(gen, *requests) == expected
    if not fails:
        assert executor.tokens[0] == 41 + 3 + 4 + 9 + 1
    assert len(executor.tokens) >= 6 + len(fails)


@settings(max_examples=examples(10), deadline=None)
@given(st.data())
def test_random_prompts_that_begin_alike_keep_every_bit(data: st.DataObject) -> None:
    """Together, with memory that runs out in some steps, in chunks and in a small pool."""
    base = llama()
    starts = [text(37, 1), text(37, 1)[:22] + text(9, 2)]
    draw = data.draw
    requests = []
    for i in range(draw(st.integers(2, 6))):
        start = draw(st.sampled_from(starts))
        prompt = start[: draw(st.integers(1, len(start)))] + text(draw(st.integers(0, 6)), i)
        requests.append(request(f"r{i}", prompt, draw(st.sampled_from((None, REFS[0]))), max_tokens=3))
    if draw(st.booleans()):
        requests[0] = replace_sampling(requests[0], prompt_logprobs=1)
    plain = make(base, cached=False)
    expected = {one.id: run(plain, one)[one.id] for one in requests}
    kv = KvCache.for_base(base, draw(st.sampled_from((112, 2048))), 4)
    executor = Counting(base, kv, draw(st.lists(st.integers(0, 5), max_size=2)))
    gen = Generator(
        base,
        shelf_of(base).store(),
        kv,
        executor,
        max_running=draw(st.sampled_from((2, 8))),
        step_tokens=draw(st.sampled_from((13, 64, 256))),
        lengths=OneMoreToken(),
    )
    assert run(gen, *requests) == expected


def test_what_is_not_computed_yet_is_not_shared() -> None:
    gen = make(llama(), step_tokens=10)
    prompt = text(30)
    late = request("late", prompt)
    expected = run(make(llama(), cached=False), late)
    gen.add(request("early", prompt, max_tokens=1))
    gen.step()  # 10 of its tokens: two pages
    gen.cancel("early")
    assert gen.pages_used == 0
    assert run(gen, late) == expected
    assert gen.scheduler.active.prefix_hits == 8


@pytest.mark.slow
def test_the_pages_of_one_that_gave_way_are_taken_up_again() -> None:
    """And a page that nobody holds keeps nobody waiting: the pool is full of them from the first requests on."""
    base = llama()
    requests = [request(f"r{i}", text(12, i), max_tokens=20) for i in range(6)]
    plain = make(base, cached=False)
    expected = {one.id: run(plain, one)[one.id] for one in requests}
    gen, computed = make(base, tokens=72), 0
    run(gen, *(request(f"before{i}", text(16, 100 + i)) for i in range(6)))
    forward = base.forward

    def count(tokens_T: torch.Tensor, *others: object, **more: object) -> torch.Tensor:
        nonlocal computed
        computed += len(tokens_T)
        return forward(tokens_T, *others, **more)  # type: ignore[arg-type]

    base.forward = count  # type: ignore[method-assign]
    for _ in range(2):
        assert run(gen, *requests) == expected
    assert gen.scheduler.preemptions > 3
    again = make(base, cached=False, tokens=72)
    with_cache, computed = computed, 0
    for _ in range(2):
        assert run(again, *requests) == expected
    assert again.scheduler.preemptions > 3
    assert with_cache < computed


def test_a_scored_prompt_computes_all_its_tokens_and_leaves_its_pages() -> None:
    base, prompt = llama(), text(41)
    gen = make(base)
    run(gen, request("first", prompt))
    scored = replace_sampling(request("scored", (*prompt, 7)), prompt_logprobs=1)
    gen.add(scored)
    count = 0
    while gen.running:
        for message in gen.step():
            assert isinstance(message, Tokens)
            count += len(message.prompt_logprobs)
    assert count == 41
    assert (gen.scheduler.active.prefix_queries, gen.scheduler.active.prefix_hits) == (41, 0)
    gen = make(base)
    run(gen, scored)
    run(gen, request("second", (*prompt, 8)))
    assert gen.scheduler.active.prefix_hits == 40


def replace_sampling(one: Generate, **changes: object) -> Generate:
    return msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, **changes))


def test_a_small_pool_full_of_old_pages_takes_what_fits_exactly() -> None:
    gen = make(llama(), tokens=64)
    for i in range(8):
        run(gen, request(f"r{i}", text(30, i)))
    whole = request("whole", text(33, 99), max_tokens=32)
    assert run(gen, whole) == run(make(llama(), cached=False), whole)


def test_what_a_step_computes_of_a_prompt_leaves_out_cached_tokens() -> None:
    generator = make(wrap_base(tiny_model("llama"), name="llama"), step_tokens=8)
    scheduler, prompt, started = generator.scheduler, text(20), dict[str, int]()
    for name, computed in (("first", [8, 8, 4]), ("again", [4])):  # 16 tokens are found; a step computes 8
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        generator.add(Generate(id=name, prompt=prompt, sampling=sampling, adapter=None, slo=Slo(ttft=1.0, tpot=1.0)))
        shares = list[int]()
        while generator.running:
            (share,) = scheduler.commit(scheduler.propose(), now=0.0)
            shares.append(share.tokens)
            started |= generator.run([share]).started
        assert shares == computed
    assert started == {"first": 0, "again": 16}
