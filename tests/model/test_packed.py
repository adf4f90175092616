"""Products of packed weights on a CPU: a row's bits do not depend on the batch, and they are those of the model."""

from __future__ import annotations

import gc
from copy import deepcopy

import pytest
import torch

from coserve.model.base import Base, wrap_base
from coserve.model.packed import OwnValues, drop_packed, pack_weights
from tests.support.families import tiny_family


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_a_rows_bits_are_the_same_in_any_batch(family: str) -> None:
    base = wrap_base(tiny_family(family), name="tiny")
    assert base.packed_rows
    tokens_T, attention = torch.arange(40) * 7 % 128, OwnValues()

    def rows(first: int, last: int, keep: torch.Tensor | None = None) -> torch.Tensor:
        of = slice(first, last)
        return base.forward(tokens_T[of], torch.arange(first, last), attention, lora=None, keep=keep)

    every = rows(0, 40)
    for first, last in ((0, 1), (7, 8), (3, 5), (2, 10), (1, 10), (20, 40)):
        assert torch.equal(rows(first, last), every[first:last])
    assert torch.equal(rows(0, 40, torch.tensor([39])), every[39:])
    base.packed_rows = ()
    torch.testing.assert_close(rows(0, 40), every)


def test_other_weights_are_not_packed() -> None:
    assert not wrap_base(tiny_family("llama").to(torch.bfloat16), name="tiny").packed_rows
    assert not wrap_base(tiny_family("qwen3_moe"), name="tiny").packed_rows


def test_dropped_weights_leave_no_copy() -> None:
    def copies() -> int:
        gc.collect()  # copies of earlier tests
        return sum(one.is_mkldnn for one in gc.get_objects() if type(one) is torch.Tensor)

    model = tiny_family("llama")
    before = copies()
    assert pack_weights(model) and copies() > before
    drop_packed(model)
    assert copies() == before
    assert wrap_base(model, name="tiny").packed_rows, "they can be packed again"


@torch.no_grad()
def test_a_copy_of_a_model_packs_weights_of_its_own() -> None:
    model = tiny_family("llama")
    wrap_base(model, name="tiny")
    copied = deepcopy(model)
    for weight in copied.parameters():
        weight.mul_(0.5)
    base, other = (wrap_base(one, name="tiny") for one in (deepcopy(copied), copied))
    assert base.packed_rows and other.packed_rows
    tokens_T = torch.arange(5)

    def logits(one: Base) -> torch.Tensor:
        return one.forward(tokens_T, tokens_T, OwnValues(), lora=None, keep=None)

    assert torch.equal(logits(base), logits(other))
    assert not torch.equal(logits(base), logits(wrap_base(model, name="tiny")))
