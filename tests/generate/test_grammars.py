"""Answers that follow a grammar: the masks of steps one by one, of steps ahead of their tokens, and on other ranks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from coserve.core.grammar import Grammar
from coserve.core.link.generation import RequestFailed
from coserve.core.sampling import SamplingParams
from coserve.core.types import FinishReason
from coserve.data.grammar import llguidance_grammar
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.engine.ranks.executor import RankedExecutor
from coserve.engine.ranks.follower import FollowerParts
from coserve.generate.execution.interface import StepExecutor
from coserve.generate.grammars import CACHED, Grammars
from coserve.generate.sampling.masks import Masks
from coserve.generate.sampling.rows import SamplingRow
from coserve.memory.kv import KvCache
from coserve.model.base import Base
from coserve.model.fused import FusedBase
from coserve.model.load import load_base
from coserve.queues.request import Request
from tests.support.examples import in_turns
from tests.support.executors import InTurn, eager, graphs
from tests.support.finetuning import Bench
from tests.support.following import Following
from tests.support.generation import collect, request
from tests.support.grammars import ANY, OBJECT, follows, generator, requests


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base("bundled", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("bundled")


@pytest.fixture(scope="module")
def grammars(base: Base, tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, base.spec.vocab)


def ahead(base: Base, kv: KvCache) -> StepExecutor:
    return graphs(FusedBase(base, compiled=False), kv, max_running=8)


def test_answers_follow_their_grammars(base: Base, tokenizer: Tokenizer, grammars: Grammars) -> None:
    """One by one, ahead of their tokens, and preempted; the batch of a request without a grammar changes nothing."""
    asked = requests(tokenizer.encode("Once upon a time"))
    kv = KvCache.for_base(base, 2048, 16)
    expected = collect(generator(base, kv, eager(base, kv), grammars), asked)
    for message in asked[:-1]:
        tokens, finished = expected[message.id]
        assert message.grammar is not None
        assert finished is FinishReason.STOP, message.id
        assert follows(tokenizer.decode(tokens), message.grammar)
    assert expected["free"] == collect(generator(base, kv, eager(base, kv), grammars), asked[-1:])["free"]
    for pages in (2048, 128):
        kv = KvCache.for_base(base, pages, 16)
        gen = generator(base, kv, ahead(base, kv), grammars)
        assert collect(gen, asked) == expected
        assert bool(gen.scheduler.preemptions) == (pages == 128)


@pytest.mark.parametrize("executor", [eager, ahead])
def test_a_text_with_a_schema_may_begin_like_a_call_instead(
    base: Base, tokenizer: Tokenizer, grammars: Grammars, executor: Callable[[Base, KvCache], StepExecutor]
) -> None:
    """By a special token, here that of a turn, or by characters; then it goes on as it likes."""
    grammar = Grammar("json_schema", json.dumps(OBJECT), calls=(("<|assistant|>", "to="), ("call:",)))
    kv, prompt = KvCache.for_base(base, 512, 16), tuple(tokenizer.encode("Once upon a time"))

    def answer(wanted: str) -> str:
        """`wanted`: a text whose first token is likely."""
        first = tokenizer.encode(wanted, add_special=False)[0]
        params = SamplingParams(max_tokens=60, temperature=0.0, logit_bias={first: 20.0}, presence_penalty=2.0)
        asked = msgspec.structs.replace(request("r", prompt, params), grammar=grammar)
        tokens, _ = collect(generator(base, kv, executor(base, kv), grammars), [asked])["r"]
        return tokenizer.decode(tokens, skip_special=False)

    assert follows(answer('{"'), grammar)
    for wanted, start in (("<|assistant|>", "<|assistant|>to="), ("call", "call:")):
        text = answer(wanted)
        assert text.startswith(start) and len(text) > len(start) + 8


def test_compiled_grammars_do_not_pile_up(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that was not used since `CACHED` others were is not kept: it is compiled again."""
    compiled = list[str]()

    def counted(grammar: Grammar) -> str:
        compiled.append(grammar.text)
        return llguidance_grammar(grammar)

    monkeypatch.setattr("coserve.generate.grammars.llguidance_grammar", counted)
    for text in ("first", "first", *(f"x{number}" for number in range(CACHED)), "first"):
        assert not grammars.compiled(Grammar("regex", text)).get_error()
    assert compiled.count("first") == 2 and len(compiled) == CACHED + 2


def test_a_grammar_that_allows_everything_changes_nothing(base: Base, tokenizer: Tokenizer, grammars: Grammars) -> None:
    kv = KvCache.for_base(base, 512, 16)
    plain = request("r", tuple(tokenizer.encode("Once upon a time")), SamplingParams(max_tokens=16, temperature=0.0))
    free = collect(generator(base, kv, ahead(base, kv), grammars), [plain])
    assert (
        collect(generator(base, kv, ahead(base, kv), grammars), [msgspec.structs.replace(plain, grammar=ANY)]) == free
    )


def test_a_request_may_end_by_its_own_tokens_only_where_the_grammar_may(
    base: Base, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    (stop,) = tokenizer.encode(" the", add_special=False)
    params = SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(stop,), logit_bias={stop: 100.0})
    asked = msgspec.structs.replace(request("r", (5, 6), params), grammar=Grammar("regex", "[0-9]{4,9}"))
    kv = KvCache.for_base(base, 512, 16)
    tokens, finished = collect(generator(base, kv, eager(base, kv), grammars), [asked])["r"]
    assert (tokens[-1], finished) == (stop, FinishReason.STOP)
    assert re.fullmatch("[0-9]{4,9}", tokenizer.decode(tokens[:-1]))


def has(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == tuple(word) for i in range(len(tokens)))


@pytest.mark.parametrize("executor", [eager, ahead])
def test_tokens_that_are_not_allowed_and_bad_words_are_never_sampled(
    base: Base, tokenizer: Tokenizer, grammars: Grammars, executor: Callable[[Base, KvCache], StepExecutor]
) -> None:
    kv = KvCache.for_base(base, 512, 16)
    plain = request("r", tuple(tokenizer.encode("Once upon a time")), SamplingParams(max_tokens=12, temperature=0.0))

    def answer(**changed: Any) -> list[int]:
        asked = msgspec.structs.replace(plain, **changed)
        return collect(generator(base, kv, executor(base, kv), grammars), [asked])["r"][0]

    free = answer()
    assert answer(bad_words=((free[0], free[0], 5),), allowed_token_ids=tuple(range(base.spec.vocab))) == free
    word = tuple(free[3:6])
    found = answer(bad_words=(word,))
    assert found[:5] == free[:5] and not has(found, word), "only its last token is forbidden"
    assert free[3] not in answer(bad_words=((free[3],),))
    some = tuple(sorted(set(free))[:3])
    assert set(answer(allowed_token_ids=some, bad_words=(some[:1],))) <= set(some[1:])
    digits = [id for digit in "0123456789" for id in tokenizer.encode(digit, add_special=False)]
    number = answer(grammar=Grammar("regex", "[0-9]{6}"), allowed_token_ids=tuple(digits[:4]))
    assert re.fullmatch("[0-3]{6}", tokenizer.decode(number))


def test_a_request_that_no_token_satisfies_fails_alone(base: Base, grammars: Grammars) -> None:
    kv = KvCache.for_base(base, 512, 16)
    params = SamplingParams(max_tokens=3)
    asked = [request("r", (5, 6), params), request("none", (5, 6), params)]
    asked[1] = msgspec.structs.replace(asked[1], allowed_token_ids=(7,), bad_words=((7,),))
    gen = generator(base, kv, eager(base, kv), grammars)
    for each in asked:
        gen.scheduler.arrive(Request(each))
    messages = []
    while gen.scheduler.requests:
        messages += gen.step()
    (failed,) = [each for each in messages if isinstance(each, RequestFailed)]
    assert (failed.id, failed.code) == ("none", "invalid_request")
    assert "leaves no token to choose" in failed.message


def test_a_queued_request_waits_for_its_grammar_which_may_fail(base: Base, tokenizer: Tokenizer) -> None:
    kv, grammars = KvCache.for_base(base, 512, 16), Grammars(lambda: tokenizer, base.spec.vocab)
    gen, compiled = generator(base, kv, eager(base, kv), grammars), threading.Semaphore(0)
    grammars.notify(compiled.release)
    params = SamplingParams(max_tokens=9, temperature=0.0)
    for id, pattern in (("bad", "("), ("good", "[0-9]{2}")):
        asked = msgspec.structs.replace(request(id, (5, 6), params), grammar=Grammar("regex", pattern))
        gen.scheduler.arrive(Request(asked))
    ends = {}

    def step() -> None:
        for message in gen.step():
            if isinstance(message, RequestFailed):
                assert message.code == "invalid_request"
            ends[message.id] = getattr(message, "finished", "failed")

    for _ in range(2):  # they may be compiled already
        step()
    assert compiled.acquire(timeout=60) and compiled.acquire(timeout=60)
    while gen.scheduler.requests:
        step()
    assert ends == {"bad": "failed", "good": FinishReason.STOP}


def test_more_requests_may_wait_for_their_own_grammars_than_are_kept(base: Base, tokenizer: Tokenizer) -> None:
    """Each is compiled once."""
    may_compile, compiled, count = threading.Event(), threading.Semaphore(0), CACHED + 8

    def load() -> Tokenizer:
        may_compile.wait()
        return tokenizer

    kv, grammars = KvCache.for_base(base, 2048, 16), Grammars(load, base.spec.vocab)
    gen = generator(base, kv, eager(base, kv), grammars, count)
    grammars.notify(compiled.release)
    for number in range(count):
        asked = request(str(number), (5, 6), SamplingParams(max_tokens=1, temperature=0.0))
        gen.scheduler.arrive(Request(msgspec.structs.replace(asked, grammar=Grammar("regex", f"{number}"))))
    gen.step()
    may_compile.set()
    for _ in range(count):
        assert compiled.acquire(timeout=60)
        gen.step()
    gen.step()
    assert not gen.scheduler.loading
    assert not compiled.acquire(blocking=False)


def ahead_in_turn(base: Base, kv: KvCache) -> StepExecutor:
    return InTurn(ahead(base, kv))


@pytest.mark.parametrize("executor", in_turns([eager, ahead_in_turn], [eager], days=2))
def test_other_ranks_apply_the_same_masks(
    executor: Callable[[Base, KvCache], StepExecutor], tmp_path: Path, grammars: Grammars
) -> None:
    mine, theirs = (load_base("bundled", device="cpu", dtype="float32") for _ in range(2))
    kvs = [KvCache.for_base(one, 512, 16) for one in (mine, theirs)]
    follower = partial(executor, theirs, kvs[1])
    asked = requests([5, 6, 7])[:3]
    kv = KvCache.for_base(mine, 512, 16)
    alone = collect(generator(mine, kv, eager(mine, kv), grammars), asked)
    parts = lambda _: FollowerParts(kvs[1], follower(), Bench(theirs, tmp_path).followed(), lambda ref, digests: None)
    with Following(parts) as following:
        ranked = RankedExecutor(executor(mine, kvs[0]), following.followers)
        assert collect(generator(mine, kvs[0], ranked, grammars), asked) == alone
        following.catch_up()
    assert torch.equal(kvs[0].buffer.bytes, kvs[1].buffer.bytes)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0), (2,)])
@pytest.mark.parametrize("sent", [False, True], ids=["here", "sent"])
def test_masks_are_found_by_their_rows(order: tuple[int, ...], sent: bool) -> None:
    """Whatever the order of a batch, or which part of it is sampled at a time; an unmasked row stays as it is."""
    allowed = {number: 5 + 9 * number for number in range(4)}  # the token that a sequence may have
    words = torch.zeros(4, 2, dtype=torch.int32)
    for row, token in enumerate(allowed.values()):
        words[row, token // 32] = 1 << token % 32
    masks = Masks({number: number for number in allowed}, words)
    if sent:
        masks = Masks.of(dict(masks.rows), masks.words.numpy().tobytes())
    rows = [SamplingRow(number, SamplingParams(), 0, masked=True) for number in order]
    logits = torch.zeros(len(rows) + 1, 40)
    masks.apply([*rows, SamplingRow(9, SamplingParams(), 0)], logits)
    assert logits.isfinite().sum(1).tolist() == [1] * len(rows) + [40]
    assert logits[:-1].argmax(1).tolist() == [allowed[number] for number in order]
