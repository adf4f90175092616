"""Drawing without a sort against drawing with one: in Triton's interpreter without a GPU, at a few tokens a program."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coserve.generate.sampling import draws
from coserve.kernels.sampling import launch
from coserve.kernels.sampling.constants import NOT_FINITE
from coserve.kernels.sampling.launch import Blocks
from tests.support.examples import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Blocks(chunk=16, peak_chunk=16, row_block=64, row_warps=4)
"""So that rows have many chunks, and passes many blocks."""


def both(logits_BV: Tensor, columns: list[tuple[float, ...]], blocks: Blocks = SMALL) -> tuple[list[int], list[int]]:
    """Tokens by the kernels, and by a sort on the CPU."""
    filters = any(k < logits_BV.shape[1] or p < 1.0 for _, _, k, p, _ in columns)
    columns_BK = torch.tensor(columns, dtype=torch.float64)
    expected = draws.draw(logits_BV, draws.likeliest(logits_BV), columns_BK, filters=filters)
    on = logits_BV.to(DEVICE)
    likeliest = launch.likeliest(on, blocks)
    found = launch.draw(on, likeliest, columns_BK.to(DEVICE), filters=filters, blocks=blocks)
    return found.tolist(), expected.tolist()


def random_logits(rows: int, vocab: int, seed: int, step: float) -> Tensor:
    """In multiples of `step`, so that some are equal; 0: any."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits / step).round() * step if step else logits


@pytest.mark.parametrize("vocab", [1, 16, 100])
def test_the_likeliest_is_the_first_of_the_highest(vocab: int) -> None:
    logits = random_logits(12, vocab, vocab, 2.0)
    logits[0] = 0.0
    logits[1] = -0.0
    logits[1, vocab // 2] = 0.0
    logits[2] = -math.inf
    logits[3, vocab // 2] = math.inf
    logits[4, vocab // 3], logits[5, 0] = math.nan, -math.nan
    logits[6, 1:] = -math.inf
    logits[7] -= 100.0
    expected = draws.likeliest(logits)
    assert launch.likeliest(logits.to(DEVICE), SMALL).tolist() == expected.tolist()
    assert expected[2:6].tolist() == [NOT_FINITE] * 4
    assert launch.likeliest(logits[:0].to(DEVICE), SMALL).tolist() == []


numbers = st.floats(0, 1, exclude_max=True)
knobs = st.tuples(
    st.sampled_from([1.0, 0.0, 0.3, 2.0, 50.0]),
    st.sampled_from([0.0, 0.0, 0.1, 0.9]),
    st.sampled_from([math.inf, 1.0, 2.0, 7.0, 40.0, 99.0]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01, 1e-30, 0.999999]),
    numbers,
)


@settings(max_examples=examples(15))
@given(
    columns=st.lists(knobs, min_size=3, max_size=3),
    vocab=st.sampled_from([1, 5, 16, 100, 131]),
    seed=st.integers(0, 999),
    step=st.sampled_from([0.0, 0.25, 4.0, 1000.0]),
)
def test_tokens_are_those_of_a_sort(columns: list[tuple[float, ...]], vocab: int, seed: int, step: float) -> None:
    found, expected = both(random_logits(len(columns), vocab, seed, step), columns)
    assert found == expected


@pytest.mark.slow
def test_ties_at_the_threshold_go_to_lower_ids() -> None:
    """Ties lie in several chunks; what is kept of them ends within one."""
    logits = torch.zeros(1, 100)
    logits[0, 70] = 1.0
    for top_k, top_p in ((30.0, 1.0), (math.inf, 0.3), (40.0, 0.7)):
        columns = [(1.0, 0.0, top_k, top_p, number / 32) for number in (0, 9, 20, 31)]
        found, expected = both(logits.expand(4, -1).contiguous(), columns)
        assert found == expected
        assert 70 in found
        assert max(token for token in found if token != 70) < 31


def test_unusable_and_greedy_rows_are_left_alone() -> None:
    logits = random_logits(5, 50, 0, 0.0)
    logits[1, 7], logits[2, 3] = math.nan, math.inf
    logits[3, 5:] = -math.inf
    logits[4] = -math.inf
    columns = [(0.0, 0.0, math.inf, 0.5, 0.5)] + [(1.0, 0.0, math.inf, 0.9, 0.99)] * 4
    found, expected = both(logits, columns)
    assert found == expected
    assert found[0] == int(logits[0].argmax())
    assert found[1] == found[2] == found[4] == NOT_FINITE
    assert 0 <= found[3] < 5


def test_rows_may_lie_apart() -> None:
    logits = random_logits(6, 40, 1, 0.0)
    columns = [(1.0, 0.0, 9.0, 0.9, i / 6) for i in range(6)]
    found, expected = both(logits[::2], columns[:3])
    assert found == expected


def test_a_threshold_between_neighbouring_weights() -> None:
    """fp32 logits so near to each other that the bisection goes down to the last bit."""
    logits = (1.0 + torch.arange(90) * 2.0**-23).flip(0)[None].expand(8, -1).contiguous()
    columns = [(0.5, 0.0, float(top_k), 1.0, 0.999) for top_k in (1, 2, 3, 40, 41, 88, 89, 90)]
    found, expected = both(logits, columns)
    assert found == expected
    assert found == sorted(found)


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 999), vocab=st.sampled_from([3, 40]), repetition=st.sampled_from([1.0, 1.3, 0.7]))
def test_penalties_are_those_of_the_reference(seed: int, vocab: int, repetition: float) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab, generator=g)
    logits[0, 0] = -math.inf
    counts = torch.randint(0, 6, (3, vocab), generator=g, dtype=torch.int32)
    rows, slots = torch.tensor([3, 0]), torch.tensor([2, 1])
    penalties = torch.tensor([[repetition, 0.3, 0.7], [1.0, -0.4, 0.0]])
    expected = logits.clone()
    draws.penalise_(expected, rows, counts, slots, penalties)
    found = logits.to(DEVICE)
    launch.penalise_(found, *(tensor.to(DEVICE) for tensor in (rows, counts, slots, penalties)), SMALL)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(expected[[1, 2]], logits[[1, 2]])


@pytest.mark.gpu
@pytest.mark.parametrize("step", [0.0, 0.0625])
def test_whole_vocabularies_on_a_gpu(step: float) -> None:
    """As shipped: blocks, warps, bfloat16."""
    logits = random_logits(16, 128256, 3, step).bfloat16()
    columns = [(0.8, 0.0, (math.inf, 40.0, 3000.0)[i % 3], (0.95, 1.0, 0.5)[i // 3 % 3], i / 16) for i in range(16)]
    found, expected = both(logits, columns, Blocks())
    assert found == expected


@pytest.mark.parametrize("vocab", [5, 64, 1099])
def test_masks_are_those_of_the_bits(vocab: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=g)
    bits = torch.randint(-(1 << 31), 1 << 31, (2, -(-vocab // 32)), generator=g).int()
    rows, expected = torch.tensor([2, 0]), logits.clone()
    draws.mask_(expected, rows, bits)
    for at, row in enumerate((2, 0)):
        allowed = [int(bits[at, v // 32]) >> (v % 32) & 1 for v in range(vocab)]
        assert expected[row].isfinite().int().tolist() == allowed
    assert torch.equal(expected[1], logits[1])
    found = logits.to(DEVICE)
    launch.mask_(found, rows.to(DEVICE), bits.to(DEVICE), SMALL)
    assert torch.equal(found.cpu(), expected)
