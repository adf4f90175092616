"""Each family with a plan, cut among ranks, gives the logits of the whole base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from coserve.model.base import load_base
from coserve.model.parallel.families import PLANS
from coserve.model.parallel.mesh import Mesh
from tests.support.examples import in_turns
from tests.support.families import tiny_family
from tests.support.lora_reference import packed, tokens_of
from tests.support.ranks import Ranks

LENGTHS = (9, 4)


def _logits(mesh: Mesh, folder: str) -> tuple[Tensor, str, dict[str, object], list[tuple[int, int]], dict[str, int]]:
    base = load_base(folder, device="cpu", dtype="auto", mesh=mesh)
    mesh.traffic.clear()
    logits = torch.cat(packed(base, [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]))
    return logits, base.spec.fingerprint, dict(base.spec.sites), base.kv_shapes, dict(mesh.traffic.calls)


@pytest.mark.parametrize("family", in_turns(sorted(PLANS), ("gemma2", "gpt2", "phi3")))
def test_a_family_cut_in_two_gives_the_same_logits(family: str, two: Ranks, tmp_path: Path) -> None:
    tiny_family(family).save_pretrained(tmp_path)
    whole = load_base(str(tmp_path), device="cpu", dtype="auto")
    expected = torch.cat(packed(whole, [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]))
    for logits, fingerprint, sites, kv_shapes, calls in two.run(_logits, str(tmp_path)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert (fingerprint, sites) == (whole.spec.fingerprint, whole.spec.sites)
        assert kv_shapes == [(heads // 2, *sizes) for heads, *sizes in whole.kv_shapes]
        assert calls == {"all_reduce": 2 * whole.spec.layers, "all_gather": 1}
