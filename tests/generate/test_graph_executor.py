"""Steps launched ahead of their tokens: the same texts as steps one by one. On CPU nothing is captured or overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from torch import Tensor

from coserve.core.link.generation import Generate, RequestFailed, Tokens
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, FinishReason
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.generate.execution.adapter_slots import AdapterSlots
from coserve.generate.execution.interface import StepExecutor, StepInFlight, StepInput
from coserve.generate.execution.token_slots import TOKEN_SLOTS
from coserve.generate.generator import Generator
from coserve.generate.grammars import Grammars
from coserve.generate.sampling.masks import Masks
from coserve.memory.kv import KvCache
from coserve.model.base import Base, wrap_base
from coserve.model.fused import FusedBase
from coserve.model.lora import LoraWeights
from coserve.queues.request import Request
from tests.support.executors import graphs
from tests.support.generation import GREEDY, adapter, answers, collect, make_generator, prompt, request
from tests.support.lengths import OneMoreToken
from tests.support.shelf import Shelf, named
from tests.support.tiny_models import VOCAB, tiny_model


@pytest.fixture(scope="module")
def base() -> Base:
    return wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())


@pytest.fixture(scope="module")
def fused(base: Base) -> FusedBase:
    return FusedBase(base, compiled=False)


def generator(fused: FusedBase, shelf: Shelf | None, *, ahead: bool, **sizes: int) -> Generator:
    return make_generator(fused.base, shelf, fused=fused if ahead else None, **sizes)


def test_texts_are_those_of_steps_one_by_one(fused: FusedBase) -> None:
    """Alone in a batch and padded, in chunks, with tokens that stop a text one step after the next began, preempted."""
    stops = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=tuple(range(0, VOCAB, 3)))
    drawn = SamplingParams(max_tokens=12, temperature=1.5, seed=3)
    sorted_ = SamplingParams(max_tokens=9, temperature=1.2, top_k=20, top_p=0.9, seed=4)
    exotic = SamplingParams(max_tokens=7, temperature=0.7, logprobs=2, frequency_penalty=0.4, seed=5)
    least = SamplingParams(max_tokens=12, min_tokens=6, temperature=0.0, stop_token_ids=tuple(range(0, VOCAB, 2)))
    repeated = SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.3, logprobs=0)
    biased = SamplingParams(max_tokens=9, temperature=0.9, top_p=0.8, logit_bias={7: 4.0, 9: -50.0}, seed=6)
    one = SamplingParams(max_tokens=1, temperature=0.0)
    kinds = [GREEDY, stops, drawn, sorted_, exotic, least, repeated, biased, one]
    requests = [request(str(i), prompt(3 + 5 * i), kind) for i, kind in enumerate(kinds)]
    expected = collect(generator(fused, None, ahead=False), requests)
    assert {finished for _, finished in expected.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    for changes in ({}, {"step_tokens": 11}, {"max_running": 3}, {"tokens": 64}):
        gen = generator(fused, None, ahead=True, **changes)
        assert collect(gen, requests) == expected, changes
        assert bool(gen.scheduler.preemptions) == ("tokens" in changes)
    for one in requests:
        assert collect(generator(fused, None, ahead=True), [one])[one.id] == expected[one.id]


def test_only_prompts_that_are_scored_go_step_by_step(
    base: Base, fused: FusedBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the others, which stay a step ahead; once they are scored they go with them."""
    odd = SamplingParams(max_tokens=6, min_tokens=3, presence_penalty=0.5, logprobs=2, logit_bias={5: 2.0}, seed=1)
    scored = SamplingParams(max_tokens=5, temperature=0.9, frequency_penalty=0.8, prompt_logprobs=1, seed=2)
    only_scored = SamplingParams(max_tokens=0, prompt_logprobs=1)
    others = [request("greedy", prompt(5)), request("odd", prompt(9), odd)]
    requests = [*others, request("scored", prompt(20), scored), request("only", prompt(12), only_scored)]
    expected = messages(generator(fused, None, ahead=False), requests)
    rows: list[int] = []
    forward = Base.forward

    def watched(self: Base, tokens_T: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(len(tokens_T))
        return forward(self, tokens_T, *args, **kwargs)

    monkeypatch.setattr(Base, "forward", watched)
    for step_tokens in (256, 7):
        rows.clear()
        assert messages(generator(fused, None, ahead=True, step_tokens=step_tokens), requests) == expected
        assert sum(rows) == 20 + 12
    rows.clear()
    assert messages(generator(fused, None, ahead=True), others) == {one.id: expected[one.id] for one in others}
    assert not rows


def messages(gen: Generator, requests: Sequence[Generate]) -> dict[str, tuple[object, ...]]:
    return {id: answer.rounded for id, answer in answers(gen, requests).items()}


def test_a_cancelled_request_leaves_nothing(fused: FusedBase) -> None:
    gen = generator(fused, None, ahead=True)
    gen.add(request("gone", prompt(5)))
    gen.add(request("stays", prompt(6)))
    gen.step()
    gen.step()
    gen.cancel("gone")
    gen.add(request("gone", prompt(7)))  # the same id again, while a step of the first is under way
    found = collect(gen, [])
    assert len(found["gone"][0]) == GREEDY.max_tokens
    assert found["gone"] == collect(generator(fused, None, ahead=False), [request("gone", prompt(7))])["gone"]


def test_logits_that_are_not_finite_fail_their_request(fused: FusedBase, monkeypatch: pytest.MonkeyPatch) -> None:
    gen = generator(fused, None, ahead=True)
    real = FusedBase.forward
    monkeypatch.setattr(FusedBase, "forward", lambda *args, **kwargs: real(*args, **kwargs) * float("nan"))
    gen.add(request("bad", prompt(5)))
    messages = [message for _ in range(3) for message in gen.step()]
    assert [type(message) for message in messages] == [RequestFailed]
    assert gen.running == gen.pages_used == 0


def test_slots_follow_the_adapters(base: Base, fused: FusedBase) -> None:
    slots = AdapterSlots(fused.groups, 2, base.device)
    a, b, c, d = named([adapter(base, i, rank) for i, rank in enumerate((4, 8, 3, 5))]).items()
    assert len(set(slots.place(dict([a, b])))) == 2
    kept = slots.place(dict([b]))[0]
    (taken,) = slots.place(dict([c]))
    assert taken != kept
    assert sorted(slots.local.ranks) == [3, 8]
    slots.free(b[0])
    assert slots.place(dict([d])) == [kept]
    assert sorted(slots.local.ranks) == [3, 5]
    names = [name for layer in fused.groups for group in layer for name in group.names]
    assert set(names) == set(base.spec.sites)
    table = slots.local.tables[fused.groups[1][0]]
    assert table.ranks[kept].tolist() == [5, 5, 5]
    assert table.addresses[kept, 1, 0] == d[1].sites[fused.groups[1][0].names[1]].a_RD.data_ptr()


@pytest.mark.parametrize(("rank", "suffixes", "captured"), [(4, ("q_proj",), 1), (24, ("",), 6)])
@pytest.mark.slow
def test_graphs_that_steps_can_do_without_are_captured_at_a_slower_pace(
    rank: int, suffixes: tuple[str, ...], captured: int
) -> None:
    base = wrap_base(tiny_model("llama", num_hidden_layers=1), name="llama", eos_token_ids=())
    fused = FusedBase(base, compiled=False)
    kv = KvCache.for_base(base, 2048, 16)
    executor = graphs(fused, kv, prepared=False, max_running=16, step_tokens=32)
    executor.warm_up()
    assert executor.graphs_missing == 0
    shelf = Shelf(named([adapter(base, 0, rank, suffixes)]))
    gen = Generator(base, shelf.store(), kv, executor, max_running=16, step_tokens=32, lengths=OneMoreToken())
    (ref,) = shelf.weights
    gen.add(request("a", prompt(8), SamplingParams(max_tokens=28, temperature=0.0), ref))
    gen.step()
    missing = executor.graphs_missing
    assert missing == 6
    while gen.running:
        gen.step()
    assert missing - executor.graphs_missing == captured


def test_messages_come_one_step_later(fused: FusedBase) -> None:
    gen = generator(fused, None, ahead=True)
    gen.add(request("one", prompt(4), SamplingParams(max_tokens=2, temperature=0.0)))
    steps = [gen.step() for _ in range(3)]
    assert [len(messages) for messages in steps] == [0, 1, 1]
    assert isinstance(steps[2][0], Tokens)
    assert gen.running == 0


class Broadcast:
    """Runs steps that were sent: as another process gets them."""

    def __init__(self, inner: StepExecutor) -> None:
        self.inner = inner
        self.forget, self.evicted, self.prepare, self.kept = inner.forget, inner.evicted, inner.prepare, inner.kept
        self.graphs_missing = inner.graphs_missing
        self.bytes = list[int]()

    def launch(self, step: StepInput, adapters: Sequence[LoraWeights]) -> Sequence[StepInFlight]:
        sent = msgspec.msgpack.encode(step)
        self.bytes.append(len(sent))
        return self.inner.launch(msgspec.msgpack.decode(sent, type=StepInput), adapters)


def test_a_steps_input_is_plain_data(base: Base, fused: FusedBase) -> None:
    """Bytes, and no object of this process: penalties, banned tokens, scored prompts, adapters and tokens in flight."""
    ref = AdapterRef("a", 1)
    shelf = Shelf({ref: adapter(base, 1, 4, ("q_proj",))})
    odd = SamplingParams(max_tokens=3, min_tokens=2, repetition_penalty=1.3, logit_bias={5: 2.0}, logprobs=1, seed=1)
    scored = SamplingParams(max_tokens=2, prompt_logprobs=1, seed=2)
    requests = [
        request("odd", prompt(9), odd),
        request("scored", prompt(12), scored),
        request("a", prompt(5), odd, ref),
    ]
    expected = messages(generator(fused, shelf, ahead=False), requests)
    kv = KvCache.for_base(base, 2048, 16)
    sent = Broadcast(graphs(fused, kv, max_running=4))
    assert messages(Generator(base, shelf.store(), kv, sent, max_running=4, step_tokens=16), requests) == expected


def test_a_text_with_penalties_is_sent_once(base: Base, fused: FusedBase) -> None:
    """Then the device counts the tokens that it samples."""
    params = SamplingParams(max_tokens=5, repetition_penalty=1.3, seed=1)
    kv = KvCache.for_base(base, 2048, 16)
    sent = Broadcast(graphs(fused, kv, max_running=4))
    gen = Generator(base, Shelf().store(), kv, sent, max_running=4, step_tokens=128)
    gen.add(request("a", prompt(100), params))
    while gen.running:
        gen.step()
    assert sent.bytes[0] - max(sent.bytes[1:]) >= 2 * 100, sent.bytes  # neither to be computed nor to be counted


def no_tokenizer() -> Tokenizer:
    raise AssertionError("no request has a grammar")


class NoMasks(Grammars):
    def masks(self, requests: Sequence[Request]) -> Masks:
        raise RuntimeError("no masks")


def test_steps_whose_masks_fail_keep_no_token_slots(base: Base, fused: FusedBase) -> None:
    """Otherwise a later step would find none."""
    size = 256
    kv, grammars = KvCache.for_base(base, 16 * size, 16), NoMasks(no_tokenizer, VOCAB)
    executor = graphs(fused, kv, max_running=size)
    gen = Generator(base, Shelf().store(), kv, executor, max_running=size, step_tokens=size, grammars=grammars)
    for step in range(TOKEN_SLOTS // size):
        for i in range(size):
            gen.add(msgspec.structs.replace(request(f"{step}.{i}", (3,)), allowed_token_ids=(5,)))
        assert len(gen.step()) == size
    assert collect(gen, [request("last", (3,))]) == collect(generator(fused, None, ahead=True), [request("last", (3,))])
