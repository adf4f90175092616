"""The sampler against an obvious reference, and its independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.core.sampling import SamplingParams
from coserve.generate.sampling.choices import Choice, NoToken
from coserve.generate.sampling.rows import SamplingRow, uniform
from coserve.generate.sampling.sampler import choose
from tests.support.examples import examples


def logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def make_row(
    params: SamplingParams, prompt: Iterable[int] = (), output: Iterable[int] = (), banned: Iterable[int] = ()
) -> SamplingRow:
    before, after = list(prompt), list(output)
    return SamplingRow(0, params, len(after), frozenset(banned), before + after, len(before))


def one(logits_V: Tensor, row: SamplingRow) -> int:
    [choice] = choose(logits_V[None], [row])
    assert isinstance(choice, Choice)
    return choice.token


def penalised(values: list[float], row: SamplingRow) -> list[float]:
    """Bias, banned tokens and penalties, token by token."""
    p, out = row.params, []
    for token, value in enumerate(values):
        value += p.logit_bias.get(token, 0.0)
        if token in row.banned:
            value = -math.inf
        if token in row.tokens:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        times = row.tokens[row.prompt_tokens :].count(token)
        value -= p.frequency_penalty * times
        if times:
            value -= p.presence_penalty
        out.append(value)
    return out


def distribution(values: list[float], p: SamplingParams) -> list[float]:
    """Probabilities after temperature, min-p, top-k and top-p, one filter after another."""
    top = max(values)
    weights = [math.exp((v - top) / p.temperature) for v in values]
    weights = [w if w >= p.min_p * max(weights) else 0.0 for w in weights]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if p.top_k > 0:
        for i in order[p.top_k :]:
            weights[i] = 0.0
    total, before = sum(weights), 0.0
    for place, i in enumerate(order):
        keep = place == 0 or before < p.top_p * total
        before += weights[i]
        if not keep:
            weights[i] = 0.0
    return [w / sum(weights) for w in weights]


PARAMS = {
    "plain": SamplingParams(),
    "off": SamplingParams(top_k=-1, top_p=1.0, min_p=0.0),
    "all kept": SamplingParams(top_k=40),
    "hot": SamplingParams(temperature=2.5),
    "cold": SamplingParams(temperature=0.3),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.15),
    "together": SamplingParams(temperature=1.4, top_k=6, top_p=0.9, min_p=0.02),
}


def test_uniform_is_uniform_over_tokens_and_seeds_alike() -> None:
    for numbers in (uniform([7] * 2000, range(2000)), uniform(range(2000), [3] * 2000)):
        bins = [sum(i / 20 <= u < (i + 1) / 20 for u in numbers) for i in range(20)]
        assert sum(bins) == 2000
        assert sum((b - 100) ** 2 / 100 for b in bins) < 60
    one, other = uniform([1, 2], [2, 1])
    assert one != other
    assert uniform([-1], [0]) == uniform([2**64 - 1], [0])


def test_temperature_zero_is_greedy_and_takes_the_first_of_equals() -> None:
    values = torch.tensor([0.0, 3.0, 1.0, 3.0])
    assert one(values, make_row(SamplingParams(temperature=0.0))) == 1
    assert one(values, make_row(SamplingParams(temperature=1e-9, seed=5))) == 1


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_token_is_at_the_uniform_number_among_kept_tokens_in_order(params: SamplingParams) -> None:
    """Of many equal logits, too, lower ids are kept first."""
    for seed in range(40):
        values = (logits(1, 30, seed)[0] * (1 + seed % 3)).round()
        row = make_row(msgspec.structs.replace(params, seed=seed), (), tuple(range(seed % 4)))
        shares = distribution(values.tolist(), params)
        chosen, number = one(values, row), uniform([seed], [seed % 4]).item()
        before = sum(shares[:chosen])
        assert before - 1e-6 <= number <= before + shares[chosen] + 1e-6


tokens = st.lists(st.integers(0, 11), max_size=8).map(tuple)


@settings(max_examples=examples(80), deadline=None)
@given(
    seed=st.integers(0, 99),
    prompt=tokens,
    output=tokens,
    repetition=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    presence=st.sampled_from([0.0, -1.0, 0.7]),
    frequency=st.sampled_from([0.0, 0.4, -0.3]),
    bias=st.dictionaries(st.integers(0, 11), st.floats(-5, 5, width=32), max_size=3),
    banned=st.sets(st.integers(0, 11), max_size=4),
)
def test_penalties_against_the_reference(
    seed: int,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    banned: set[int],
) -> None:
    """Greedy shows the largest adjusted logit, sampling the distribution."""
    settings_ = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "logit_bias": bias,
    }
    values = logits(1, 12, seed)[0]
    greedy = make_row(SamplingParams(temperature=0.0, **settings_), prompt, output, banned)
    adjusted = penalised(values.tolist(), greedy)
    assert adjusted[one(values, greedy)] >= max(adjusted) - 1e-5
    sampled = make_row(SamplingParams(seed=seed, **settings_), prompt, output, banned)
    cumulative, u = 0.0, uniform([seed], [len(output)]).item()
    chosen = one(values, sampled)
    shares = distribution(adjusted, sampled.params)
    cumulative = sum(shares[:chosen])
    assert cumulative - 1e-6 <= u <= cumulative + shares[chosen] + 1e-6


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    vocab, many = 515, 37
    values = logits(many, vocab)
    rows = [
        make_row(
            SamplingParams(
                temperature=(0.0, 0.6, 1.0, 1.7)[i % 4],
                top_k=(0, 5, 50)[i % 3],
                top_p=(1.0, 0.8)[i % 2],
                min_p=(0.0, 0.05)[i % 5 == 0],
                repetition_penalty=(1.0, 1.2)[i % 7 == 0],
                logprobs=(None, 0, 4)[i % 3],
                seed=i,
            ),
            prompt=(1, 2, 3),
            output=tuple(range(i)),
        )
        for i in range(many)
    ]
    together = choose(values, rows)
    for i in range(many):
        assert choose(values[i : i + 1], [rows[i]]) == [together[i]]
    assert choose(values[5:9], rows[5:9]) == together[5:9]


def test_logprobs_are_of_the_raw_logits() -> None:
    values = logits(1, 20)[0]
    params = SamplingParams(temperature=0.2, top_k=2, logit_bias={3: 50.0}, repetition_penalty=1.5, logprobs=3)
    [choice] = choose(values[None], [make_row(params, (1, 2), ())])
    expected = values.double().log_softmax(-1)
    assert isinstance(choice, Choice)
    assert choice.token == 3
    assert choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(expected[3].item(), abs=1e-5)
    order = expected.argsort(descending=True)[:3].tolist()
    assert [token for token, _ in choice.logprob.top] == order
    assert [value for _, value in choice.logprob.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def test_no_logprobs_unless_asked_for_and_none_but_the_chosen_for_zero() -> None:
    values = logits(2, 20)
    without, chosen = choose(values, [make_row(SamplingParams()), make_row(SamplingParams(logprobs=0))])
    assert isinstance(without, Choice)
    assert without.logprob is None
    assert isinstance(chosen, Choice)
    assert chosen.logprob is not None
    assert chosen.logprob.top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    values = logits(3, 20)
    values[1, 7] = bad
    rows = [make_row(SamplingParams(seed=i, logprobs=1, top_p=0.9)) for i in range(3)]
    first, failed, last = choose(values, rows)
    assert failed is NoToken.NOT_FINITE
    assert [first, last] == choose(values[[0, 2]], [rows[0], rows[2]])


def test_nothing_left_to_choose_is_a_failure_not_a_token() -> None:
    assert choose(torch.zeros(1, 2), [make_row(SamplingParams(), (), (), {0, 1})]) == [NoToken.NONE_LEFT]
