"""The prefix cache of bases with recurrent states changes what is computed and nothing else: tokens and
log-probabilities keep every bit on CPU, where those of a prompt in chunks do."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coserve.core.link.generation import Generate
from coserve.core.types import AdapterRef
from coserve.generate.generator import Generator
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from tests.support.examples import examples, in_turns
from tests.support.executors import eager
from tests.support.families import tiny_family
from tests.support.generation import answers, text
from tests.support.lengths import OneMoreToken
from tests.support.memory_faults import out_of_memory_at
from tests.support.prefixes import REFS, Results, request, run, shelf_of

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILY = "jamba"
ROUNDED = ("qwen3_5_text", "nemotron_h", "falcon_h1")
"""Without a cache, too, the last bits of such a tiny base depend on the number of rows."""


@cache
def base_of(family: str) -> Base:
    return wrap_base(tiny_family(family, max_position_embeddings=256), name=family, eos_token_ids=())


def make(
    family: str = FAMILY, *, tokens: int = 2048, cached: bool = True, running: int = 8, step: int = 256
) -> Generator:
    base = base_of(family)
    kv = KvCache.for_base(base, tokens, 4, sequences=running)
    return Generator(
        base,
        shelf_of(base).store(),
        kv,
        eager(base, kv),
        max_running=running,
        step_tokens=step,
        lengths=OneMoreToken(),
        prefix_cache=cached,
    )


def plain(family: str, *requests: Generate) -> Results:
    """Each alone, without a cache."""
    gen = make(family, cached=False)
    found = {one.id: run(gen, one)[one.id] for one in requests}
    assert (gen.scheduler.active.prefix_queries, gen.scheduler.active.prefix_hits) == (0, 0)
    return found


@pytest.mark.parametrize("family", in_turns([FAMILY, "lfm2", *ROUNDED], [FAMILY, "qwen3_5_text"]))
@pytest.mark.parametrize("ref", [None, REFS[0]])
def test_the_turns_of_a_chat_are_computed_once(family: str, ref: AdapterRef | None) -> None:
    """Up to the last whole page but one of the prompt before, as a template's last tokens may not come again."""
    turns = [request("0", text(45), ref)]
    for turn in range(1, 4):
        answer = plain(family, turns[-1])[turns[-1].id][0]
        turns.append(request(str(turn), turns[-1].prompt[:-2] + tuple(answer) + text(30, turn), ref))
    expected = plain(family, *turns)
    for step in (256, 13):
        gen, hits = make(family, step=step), list[int]()
        for one in turns:
            before = gen.scheduler.active.prefix_hits
            found, told = run(gen, one)[one.id], expected[one.id]
            if family in ROUNDED:
                assert found[0] == told[0]
                values = [[each.logprob for each in logprobs] for _, logprobs in (found, told)]
                assert values[0] == pytest.approx(values[1], abs=1e-5)
            else:
                assert found == told
            hits.append(gen.scheduler.active.prefix_hits - before)
        assert hits == [0, *(len(one.prompt) // 4 * 4 - 4 for one in turns[:-1])]
        assert gen.scheduler.active.prefix_queries == sum(len(one.prompt) for one in turns)


def test_a_common_beginning_is_kept_where_two_prompts_part() -> None:
    shared, adapters = text(42), (None, REFS[0])
    asked = [request(f"{ref} {n}", shared + text(30, 1 + n), ref) for ref in adapters for n in range(4)]
    gen, expected, hits = make(), plain(FAMILY, *asked), list[int]()
    for one in asked:
        before = gen.scheduler.active.prefix_hits
        assert run(gen, one)[one.id] == expected[one.id]
        hits.append(gen.scheduler.active.prefix_hits - before)
    assert hits == 2 * [0, 0, 40, 40]


def test_two_adapters_and_the_base_side_by_side_begin_behind_their_own_states() -> None:
    asked = [request(f"{ref}", text(60), ref) for ref in (None, *REFS)]
    others = [request(f"{ref} {n}", text(60)[:57] + text(n, n), ref) for ref in (None, *REFS) for n in (1, 9)]
    expected = plain(FAMILY, *asked, *others)
    for step in (512, 17):
        gen = make(step=step)
        assert run(gen, *asked) | run(gen, *others) == expected
        assert gen.scheduler.active.prefix_hits == 8 * 56


def test_nobody_begins_behind_the_state_of_another_version_adapter_or_salt() -> None:
    whose = [(None, ""), *((ref, "") for ref in REFS), (None, "tenant"), (REFS[0], "tenant")]
    asked = [request(f"{ref} {salt}", text(41), ref, salt=salt) for ref, salt in whose]
    expected = plain(FAMILY, *asked)
    assert len({str(tokens) for tokens, _ in expected.values()}) == 4
    gen = make()
    for hits in (0, 36):
        for one in asked:
            before = gen.scheduler.active.prefix_hits
            assert run(gen, one)[one.id] == expected[one.id]
            assert gen.scheduler.active.prefix_hits - before == hits, one.id


def test_what_was_evicted_is_computed_again() -> None:
    """The pool has room for about one prompt and its snapshot."""
    asked = [request(str(n), text(50, n)) for n in (0, 1, 0, 2, 1)]
    expected = plain(FAMILY, *asked[:2], asked[3])
    gen = make(tokens=96)
    for one in asked:
        assert run(gen, one)[one.id] == expected[one.id]
    assert gen.scheduler.active.prefix_hits == 0
    assert run(gen, asked[-1]) == {"1": expected["1"]}
    assert gen.scheduler.active.prefix_hits == 44


def test_a_request_that_needs_the_pages_of_its_own_snapshot_takes_them() -> None:
    gen, long = make(tokens=88), request("long", text(50) + text(20, 1), max_tokens=18)
    run(gen, request("first", text(50)))
    assert run(gen, long) == plain(FAMILY, long)


def test_one_that_is_cancelled_in_its_prompt_leaves_the_states_that_it_reached() -> None:
    late = request("late", text(80))
    expected = plain(FAMILY, late)
    for steps, hits in ((1, 0), (2, 40), (3, 40)):
        gen = make(step=20)
        run(gen, request("first", text(40) + text(9, 1)))  # the next one stops where it leaves this
        gen.add(request("early", text(80)))
        for _ in range(steps):
            gen.step()
        gen.cancel("early")
        assert gen.pages_used == 0
        before = gen.scheduler.active.prefix_hits
        assert run(gen, late) == expected
        assert gen.scheduler.active.prefix_hits - before == hits, steps


def test_a_scored_prompt_computes_all_its_tokens_and_leaves_its_states() -> None:
    gen, scored = make(), request("scored", text(41), prompt_logprobs=1)
    alone = answers(make(cached=False), [scored])
    for _ in range(2):
        assert answers(gen, [scored]) == alone
        assert gen.scheduler.active.prefix_hits == 0
    again = request("again", text(41))
    assert run(gen, again) == plain(FAMILY, again)
    assert gen.scheduler.active.prefix_hits == 36


@settings(max_examples=examples(20, fast=3), deadline=None)
@given(st.data())
def test_random_prompts_that_begin_alike_keep_every_bit(data: st.DataObject) -> None:
    """Together, with memory that runs out in a step, in chunks and in a small pool, and again."""
    draw, starts = data.draw, [text(37, 1), text(37, 1)[:22] + text(25, 2)]
    asked = []
    for i in range(draw(st.integers(2, 6))):
        start = draw(st.sampled_from(starts))
        prompt = start[: draw(st.integers(1, len(start)))] + text(draw(st.integers(0, 9)), i)
        asked.append(request(f"r{i}", prompt, draw(st.sampled_from((None, REFS[0]))), max_tokens=5))
    expected = plain(FAMILY, *asked)
    gen = make(
        tokens=draw(st.sampled_from((260, 2048))),
        running=draw(st.sampled_from((2, 8))),
        step=draw(st.sampled_from((13, 64, 256))),
    )
    failing = draw(st.sets(st.integers(1, 40), max_size=2))
    with out_of_memory_at([(type(base_of(FAMILY).layers[0]), "forward")], lambda call: call in failing):
        assert run(gen, *asked) == expected
    assert run(gen, *asked) == expected
