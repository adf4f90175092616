"""Tokens chosen ahead of the host are those that the host would choose, and so are their log-probabilities."""

from __future__ import annotations

import math
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.core.link.generation import Generate
from coserve.core.sampling import SamplingParams
from coserve.core.types import Slo
from coserve.generate.sampling import device_sampler
from coserve.generate.sampling.choices import Choice, NoToken, choices
from coserve.generate.sampling.device_sampler import DeviceSampler
from coserve.generate.sampling.draws import likeliest
from coserve.generate.sampling.logprobs import logprobs_of
from coserve.generate.sampling.sampler import choose
from coserve.generate.step_input import sampling_row
from coserve.queues.request import Request
from tests.support.examples import examples

VOCAB = 24
DEVICE = torch.device("cpu")
NUMBERS = count()


def sequence(params: SamplingParams, prompt: tuple[int, ...] = (1, 2, 3), stop_ids: frozenset[int] = frozenset()):
    message = Generate(id="x", prompt=prompt, sampling=params, adapter=None, slo=Slo(ttft=1, tpot=1))
    return Request(message, number=next(NUMBERS), stop_ids=stop_ids)


def logits(rows: int, seed: int) -> Tensor:
    """Rounded, so that some are equal."""
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4).round() / 2


def by_the_host(logits_BV: Tensor, ready: list[Request]) -> list[Choice | NoToken]:
    return choose(logits_BV, [sampling_row(s) for s in ready], batch=2)


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.6, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9, width=32), max_size=3),
    logprobs=st.sampled_from([None, None, 0, 3]),
    min_tokens=st.sampled_from([0, 4]),
    seed=st.integers(0, 9),
)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6).map(tuple)


@settings(max_examples=examples(60))
@given(
    asked=st.lists(st.tuples(params, prompts), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8),
    seed=st.integers(0, 99),
)
def test_tokens_and_logprobs_are_those_of_the_host(
    asked: list[tuple[SamplingParams, tuple[int, ...]]], steps: list[tuple[bool, bool]], seed: int
) -> None:
    """Some steps leave out a sequence, and some are chosen by the host, when nothing is under way."""
    device = DeviceSampler(VOCAB, DEVICE, batch=2)
    ahead = [sequence(*one, frozenset({0, 1, 2, 3})) for one in asked]
    known = [sequence(*one, frozenset({0, 1, 2, 3})) for one in asked]
    copying: list[tuple[Request, int]] = []
    for t, (by_host, fewer) in enumerate(steps):
        places = range(1 if fewer else 0, len(asked))
        values = logits(len(asked), 100 * seed + t)[places.start :]
        expected = by_the_host(values, [known[i] for i in places])
        if by_host:
            collect(copying)
            found = by_the_host(values, [ahead[i] for i in places])
        else:  # the host does not know the tokens of the step before yet
            ready = [ahead[i] for i in places]
            chosen = device.choose(values, likeliest(values), [sampling_row(s) for s in ready])
            found = choices(chosen.fetch())
            for one in ready:
                one.in_flight += 1
            collect(copying)
            copying = [(one, choice.token) for one, choice in zip(ready, found, strict=True) if choice]
        assert found == expected
        for i, choice in zip(places, expected, strict=True):
            assert choice is not None
            known[i].push(choice.token)
            if by_host:
                ahead[i].push(choice.token)


def collect(copying: list[tuple[Request, int]]) -> None:
    for one, token in copying:
        one.in_flight -= 1
        one.push(token)
    copying.clear()


def test_rows_of_ended_sequences_are_taken_again() -> None:
    device = DeviceSampler(VOCAB, DEVICE)
    penalised = SamplingParams(temperature=0.0, frequency_penalty=100.0)
    for turn in range(20):
        some = [sequence(penalised) for _ in range(3)]
        for t in range(3):
            values = logits(3, t)
            found = choices(device.choose(values, likeliest(values), [sampling_row(s) for s in some]))
            assert found == by_the_host(values, some), turn
            for one, choice in zip(some, found, strict=True):
                assert choice is not None
                one.push(choice.token)
        for one in some:
            device.forget(one.number)
    assert device.history_rows == 4


def test_only_rows_with_penalties_take_memory() -> None:
    device = DeviceSampler(VOCAB, DEVICE)
    kinds = [SamplingParams(), SamplingParams(logit_bias={3: 1.0}), SamplingParams(logprobs=5, top_p=0.5)]
    values = logits(len(kinds), 0)
    device.choose(values, likeliest(values), [sampling_row(sequence(kind)) for kind in kinds])
    assert device.history_rows == 0


def test_a_row_that_is_not_finite_fails_alone() -> None:
    """Also where its bad token is banned, or the next step follows before anybody knows."""
    device = DeviceSampler(VOCAB, DEVICE)
    values = logits(3, 0)
    values[1, 0] = math.nan
    odd = SamplingParams(min_tokens=9, presence_penalty=1.0, logprobs=2)
    some = [sequence(odd, stop_ids=frozenset({0})) for _ in range(3)]
    for _ in range(2):
        first, failed, last = choices(device.choose(values, likeliest(values), [sampling_row(s) for s in some]))
        assert failed is NoToken.NOT_FINITE
        assert isinstance(first, Choice)
        assert isinstance(last, Choice)
        for one in some:
            one.in_flight += 1


def test_a_request_that_leaves_itself_no_token_is_told_apart_from_logits_that_are_not_finite() -> None:
    some = [sequence(SamplingParams(min_tokens=9), stop_ids=frozenset(range(VOCAB))) for _ in range(2)]
    values = logits(2, 0)
    values[1] = math.inf
    got = choices(DeviceSampler(VOCAB, DEVICE).choose(values, likeliest(values), [sampling_row(s) for s in some]))
    assert got == [NoToken.NONE_LEFT, NoToken.NOT_FINITE]


def test_nothing_to_choose() -> None:
    device = DeviceSampler(VOCAB, DEVICE)
    empty = torch.zeros(0, 512)
    assert choices(device.choose(empty, likeliest(empty), [])) == []


@pytest.mark.parametrize("vocab", [100, 1024])
@pytest.mark.parametrize("n", [0, 1, 20])
def test_the_likeliest_are_those_of_a_stable_sort(vocab: int, n: int) -> None:
    raw = (torch.randn(7, vocab, generator=torch.Generator().manual_seed(n)) * 3).round()
    raw[0] = 0.0
    raw[1] = -0.0
    raw[1, ::2] = 0.0
    raw[2, 5:] = -math.inf
    chosen = raw.argmin(-1)
    values, ids = logprobs_of(raw, chosen, n)
    expected = raw.log_softmax(-1)
    assert ids.tolist() == raw.sort(stable=True, descending=True, dim=-1).indices[:, :n].tolist()
    assert torch.equal(values, expected.gather(1, torch.cat([chosen[:, None], ids], 1)))


def test_warming_up_meets_all_that_a_request_can_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits as the model gives them and as penalties make them, with filters and without."""
    met: set[tuple[str, torch.dtype, bool]] = set()

    def spied(name: str) -> None:
        inner = getattr(device_sampler, name)

        def spy(logits: torch.Tensor, *args: object, filters: bool = False, **options: object) -> object:
            met.add((name, logits.dtype, filters))
            return inner(logits, *args, **options, **({"filters": filters} if name == "draw" else {}))

        monkeypatch.setattr(device_sampler, name, spy)

    for name in ("draw", "logprobs_of", "penalise_"):
        spied(name)
    DeviceSampler(VOCAB, DEVICE).warm_up(torch.bfloat16)
    both = (torch.bfloat16, torch.float32)
    assert {("draw", dtype, filters) for dtype in both for filters in (False, True)} <= met
    assert {("logprobs_of", dtype, False) for dtype in both} <= met
    assert ("penalise_", torch.float32, False) in met
