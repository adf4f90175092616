"""Log-probabilities of prompts against the whole model's own log-softmax: alone, in chunks, preempted, with
adapters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from coserve.core.link.generation import Generate, RequestFailed, Tokens
from coserve.core.logprobs import TokenLogprob
from coserve.core.sampling import SamplingParams
from coserve.core.types import AdapterRef, FinishReason
from coserve.generate.generator import Generator
from coserve.generate.sampling.scoring import PromptScoring, prompt_logprobs
from coserve.model.base import Attention, Base, wrap_base
from tests.support.generation import adapter, make_generator, prompt, request
from tests.support.shelf import Shelf
from tests.support.tiny_models import tiny_model

SCORE = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=2)
POET = AdapterRef("poet", 1)


@cache
def base() -> Base:
    return wrap_base(tiny_model("llama"), name="llama", eos_token_ids=())


def generator(**sizes: int) -> Generator:
    shelf = Shelf({POET: adapter(base(), 0, 2)})
    return make_generator(
        base(), shelf, **({"tokens": 512, "page_tokens": 4, "step_tokens": 64, "max_running": 8} | sizes)
    )


def ask(id: str, tokens: tuple[int, ...], sampling: SamplingParams = SCORE, ref: AdapterRef | None = None) -> Generate:
    return request(id, tokens, sampling, ref)


def run(gen: Generator, requests: Iterable[Generate]) -> dict[str, list[Tokens]]:
    """All messages of each request."""
    for one in requests:
        gen.add(one)
    found: dict[str, list[Tokens]] = {}
    while gen.running:
        for message in gen.step():
            assert isinstance(message, Tokens)
            found.setdefault(message.id, []).append(message)
    assert gen.pages_used == 0
    return found


def scores(messages: Iterable[Tokens]) -> list[TokenLogprob]:
    return [entry for message in messages for entry in message.prompt_logprobs]


@torch.no_grad()
def direct(tokens: tuple[int, ...]) -> Tensor:
    """(T, V): the model's own, in one call."""
    return tiny_model("llama")(torch.tensor([tokens])).logits[0].log_softmax(-1)


def check(entries: list[TokenLogprob], tokens: tuple[int, ...]) -> None:
    expected = direct(tokens)
    assert len(entries) == len(tokens) - 1
    for at, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[at, tokens[at + 1]].item(), abs=1e-4)
        assert [id for id, _ in entry.top] == expected[at].topk(2).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[at].topk(2).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 17, 40])
def test_a_prompt_is_scored_and_nothing_generated(length: int) -> None:
    tokens = prompt(length)
    messages = run(generator(), [ask("a", tokens)])["a"]
    check(scores(messages), tokens)
    assert [message.finished for message in messages] == [None] * (len(messages) - 1) + [FinishReason.LENGTH]
    assert not any(message.tokens for message in messages)


@pytest.mark.parametrize("step_tokens", [1, 7, 64])
def test_steps_of_any_size_score_alike(step_tokens: int) -> None:
    tokens = prompt(20)
    check(scores(run(generator(step_tokens=step_tokens), [ask("a", tokens)])["a"]), tokens)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_rows_are_scored_alike_in_chunks_of_any_size(chunk: int) -> None:
    logits, tokens = direct(prompt(20))[:-1], prompt(20)[1:]
    scorings = [PromptScoring(0, tokens[:12], 2), PromptScoring(12, tokens[12:], 2)]
    first, second = prompt_logprobs(logits, scorings, chunk)
    assert first is not None and second is not None
    check([*first, *second], prompt(20))


def test_few_logits_are_kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {str(i): prompt(12, i) for i in range(4)}
    gen = generator(step_tokens=64, scored_tokens=8)
    forward, kept = base().forward, []

    def watched(tokens_T: Tensor, positions_T: Tensor, attention: Attention, **kwargs: Any) -> Tensor:
        kept.append(len(kwargs["keep"]))
        return forward(tokens_T, positions_T, attention, **kwargs)

    monkeypatch.setattr(base(), "forward", watched)
    plain = ask("plain", prompt(30), SamplingParams(max_tokens=2))
    messages = run(gen, [*(ask(id, tokens) for id, tokens in asked.items()), plain])
    assert max(kept) <= 8 + 1  # and the last row of the one that generates
    for id, tokens in asked.items():
        check(scores(messages[id]), tokens)


def test_scores_come_before_the_tokens_and_do_not_change_them() -> None:
    tokens = prompt(20)
    plain = SamplingParams(max_tokens=6, seed=3)
    both = SamplingParams(max_tokens=6, seed=3, prompt_logprobs=2)
    messages = run(generator(step_tokens=8), [ask("plain", tokens, plain), ask("both", tokens, both)])
    check(scores(messages["both"]), tokens)
    assert not scores(messages["plain"])
    order = [bool(message.tokens) for message in messages["both"]]
    assert order == sorted(order)
    texts = [[token for message in messages[id] for token in message.tokens] for id in ("plain", "both")]
    assert texts[0] == texts[1]


def test_a_preempted_prompt_is_scored_once() -> None:
    long = SamplingParams(max_tokens=20, seed=1, prompt_logprobs=2)
    asked = {str(i): prompt(12, i) for i in range(4)}
    gen = generator(tokens=64, step_tokens=16)
    messages = run(gen, [ask(id, tokens, long) for id, tokens in asked.items()])
    assert gen.scheduler.preemptions
    for id, tokens in asked.items():
        check(scores(messages[id]), tokens)


def test_scores_are_those_of_the_adapter() -> None:
    tokens = prompt(20)
    messages = run(generator(), [ask("base", tokens), ask("poet", tokens, ref=POET)])
    own, adapted = scores(messages["base"]), scores(messages["poet"])
    check(own, tokens)
    assert max(abs(a.logprob - b.logprob) for a, b in zip(own, adapted, strict=True)) > 0.01
    assert scores(run(generator(), [ask("poet", tokens, ref=POET)])["poet"]) == adapted  # alone, the same bits


def test_the_chosen_value_is_the_likeliest_one_bit_for_bit() -> None:
    """Readers find greedy tokens by comparing the two."""
    tokens = list(prompt(5))
    for _ in range(10):
        tokens.append(int(direct(tuple(tokens))[-1].argmax()))
    entries = scores(run(generator(), [ask("a", tuple(tokens))])["a"])
    assert all(entry.logprob == max(value for _, value in entry.top) for entry in entries[4:])


def test_logits_that_are_not_finite_fail_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gen = generator()
    forward = base().forward

    def broken(tokens_T: Tensor, *args: object, **kwargs: object) -> Tensor:
        logits = forward(tokens_T, *args, **kwargs)
        kept = kwargs["keep"]
        assert isinstance(kept, Tensor)
        logits[tokens_T[kept] == 127] = math.nan
        return logits

    monkeypatch.setattr(base(), "forward", broken)
    both = SamplingParams(max_tokens=2, prompt_logprobs=0)
    for id, tokens in (("bad", (5, 127, 6)), ("good", (5, 6, 7))):
        gen.add(ask(id, tokens, both))
    messages = gen.step()
    assert [message.id for message in messages if isinstance(message, RequestFailed)] == ["bad"]
    assert gen.running == 1
    while gen.running:
        gen.step()
    assert gen.pages_used == 0
