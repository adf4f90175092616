"""New adapters: PEFT's distributions, a function of seed and site."""

from __future__ import annotations

import math

import pytest
import torch

from coserve.core.types import LoraSettings, SiteSpec
from coserve.finetune.init import new_adapter
from coserve.model.lora import LoraWeights
from tests.support.records import make_base_spec

BASE = make_base_spec(
    {f"model.layers.{i}.mlp.{name}": SiteSpec(64, 48, i) for i in range(2) for name in ("up_proj", "gate_proj")},
    hidden=64,
)


def _new(seed: int = 0, dtype: torch.dtype = torch.float32, **settings: object) -> LoraWeights:
    return new_adapter(LoraSettings(**settings), BASE, seed=seed, dtype=dtype, device="cpu")


def test_default_is_kaiming_and_changes_nothing_yet() -> None:
    for pair in _new(r=32).sites.values():
        assert pair.a_RD.shape == (32, 64)
        assert pair.b_OR.shape == (48, 32)
        assert torch.count_nonzero(pair.b_OR) == 0
        bound = 1 / math.sqrt(64)
        assert float(pair.a_RD.abs().max()) <= bound
        assert float(pair.a_RD.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert pair.scaling == 2.0


def test_gaussian_has_pefts_deviation() -> None:
    for pair in _new(r=32, init="gaussian").sites.values():
        assert float(pair.a_RD.std()) == pytest.approx(1 / 32, rel=0.1)
        assert torch.count_nonzero(pair.b_OR) == 0


def test_orthogonal_starts_with_a_zero_product_of_nonzero_factors() -> None:
    """As in PEFT, rows of A and columns of B come from orthogonal halves, so their product vanishes."""
    for pair in _new(r=8, init="orthogonal").sites.values():
        assert float((pair.b_OR @ pair.a_RD).abs().max()) < 1e-5
        assert float(pair.a_RD.std()) > 0.01
        assert float(pair.b_OR.std()) > 0.01


@pytest.mark.parametrize("init", ["default", "gaussian", "orthogonal"])
def test_a_site_depends_on_the_seed_and_itself_alone(init: str) -> None:
    first, again, other = _new(init=init), _new(init=init), _new(init=init, seed=1)
    some = _new(init=init, targets=("gate_proj",))
    pairs = list(first.sites.values())
    for site, pair in first.sites.items():
        assert torch.equal(pair.a_RD, again.sites[site].a_RD)
        assert torch.equal(pair.b_OR, again.sites[site].b_OR)
        assert not torch.equal(pair.a_RD, other.sites[site].a_RD)
        if site in some.sites:
            assert torch.equal(pair.a_RD, some.sites[site].a_RD)
    assert not torch.equal(pairs[0].a_RD, pairs[1].a_RD)


def test_the_type_and_the_patterns_are_as_asked() -> None:
    weights = _new(r=4, alpha=6.0, rank_pattern={"1.mlp.up_proj": 2}, dtype=torch.bfloat16)
    ranks = {site: (pair.rank, pair.scaling) for site, pair in weights.sites.items()}
    assert ranks["model.layers.0.mlp.up_proj"] == (4, 1.5)
    assert ranks["model.layers.1.mlp.up_proj"] == (2, 3.0)
    assert {pair.a_RD.dtype for pair in weights.sites.values()} == {torch.bfloat16}
