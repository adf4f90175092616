"""Each family with a plan, cut among ranks, gives the logits and the gradients of the whole base."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import PreTrainedModel

from coserve.core.types import SiteSpec
from coserve.kernels.attention.backend import paged_attention
from coserve.kernels.attention.expanded import ExpandedAttention, StepTerms
from coserve.kernels.attention.interface import KvShape, TokenRun
from coserve.memory.kv import KvCache
from coserve.memory.state_pool import state_bytes
from coserve.model.base import Base
from coserve.model.experts.shards import EXPERTS
from coserve.model.fused import FusedBase
from coserve.model.load import load_base
from coserve.model.parallel.adapter import Matrices
from coserve.model.parallel.families.plans import PLANS
from coserve.model.parallel.mesh import LoneRank, Mesh
from coserve.model.parallel.modules import MEAN
from coserve.model.seam import ReferenceAttention
from tests.support import quantised
from tests.support.examples import in_turns
from tests.support.families import tiny_family
from tests.support.lora_backends import lora_of
from tests.support.lora_reference import packed, tokens_of
from tests.support.ranks import Ranks
from tests.support.sharded import Kind, gradients_of, whole_adapter

LENGTHS = (9, 4)
ADAPTER = Kind(4, uneven=("q_proj", "v_proj", "up_proj", "shared_expert_gate", "dense", "fc2", "q_a_proj"))
"""At every linear module; the uneven ones go by `nfs`, as the ranks do not divide their LoRA rank."""
OF_EACH_KIND = ("gemma2", "gpt2", "olmo2", "qwen2_moe", "deepseek_v3", "qwen3_5_text", "nemotron_h", "lfm2")


class Computed(NamedTuple):
    logits: Tensor
    gradients: tuple[float, Matrices, float]
    fingerprint: str
    sites: dict[str, SiteSpec]
    kv_shapes: list[KvShape]
    state_bytes: int
    """Bytes of one sequence's recurrent states."""
    calls: dict[str, int]
    """Collectives of one forward."""
    sums: int
    """Sums that the plan has."""


SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "one group of Mamba-2, which is on both ranks, as in Granite 4": ("granitemoehybrid", {"mamba_n_groups": 1}),
    "one group whose norm has its size": ("nemotron_h", {"n_groups": 1}),
    "one group, with a factor for each feature": ("falcon_h1", {"mamba_n_groups": 1}),
    "one group with a norm": ("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": True}),
    "a norm of each group": ("falcon_h1", {"mamba_rms_norm": True}),
    "experts beside Mamba": ("jamba", {"expert_layer_offset": 1, "expert_layer_period": 2}),
    "fused heads that share one key": ("phi3", {"num_key_value_heads": 1}),
    "fused heads with keys of their own": ("gpt_bigcode", {"multi_query": False}),
    "projections before and after the layers": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
}
"""What a family's models may have, and `tiny_family` has not."""


def _computed(mesh: Mesh | None, folder: str, ep: int = 1, strategy: str = "slora") -> Computed:
    base = load_base(folder, device="cpu", dtype="auto", mesh=mesh, strategy=strategy, ep=ep)
    traffic = Mesh().traffic if mesh is None else mesh.traffic
    traffic.clear()
    logits = torch.cat(packed(base, [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]))
    calls, gradients = dict(traffic.calls), gradients_of(base, ADAPTER)
    if mesh is not None:
        FusedBase(base, compiled=False).check()
    spec, states = base.spec, state_bytes(base.states, base.dtype)
    shapes = [*base.kv_shapes]
    return Computed(logits, gradients, spec.fingerprint, dict(spec.sites), shapes, states, calls, _sums(base))


def _sums(base: Base) -> int:
    """Row-parallel modules, modules of experts, and norms over all ranks' features."""
    sites = {} if base.sharding is None else base.sharding.sites
    others = sum(hasattr(module, MEAN) or hasattr(module, EXPERTS) for module in base.model.modules())
    outputs = 2 * base.spec.layers if base.spec.family == "jetmoe" else 0  # of blocks that no linear module ends
    return sum(one.sums for one in sites.values()) + others + outputs


@pytest.mark.parametrize("family", in_turns(sorted(PLANS), OF_EACH_KIND))
def test_a_family_cut_in_two_gives_the_same_logits_and_gradients(family: str, two: Ranks, tmp_path: Path) -> None:
    _compare(tiny_family(family), two, tmp_path)


@pytest.mark.parametrize("case", in_turns(SETTINGS, [*SETTINGS][:1]))
def test_other_settings_of_a_family(case: tuple[str, dict[str, object]], two: Ranks, tmp_path: Path) -> None:
    family, settings = case
    _compare(tiny_family(family, **settings), two, tmp_path)


@pytest.mark.slow
def test_experts_without_adapters_are_divided_too(two: Ranks, tmp_path: Path) -> None:
    _compare(tiny_family("llama4_text"), two, tmp_path, ep=2)


@pytest.mark.parametrize("ep", [1, 2], ids=["features", "experts"])
def test_experts_in_mxfp4_are_divided_as_dense_ones(ep: int, two: Ranks, tmp_path: Path) -> None:
    tiny_family("gpt_oss", hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    _check(two, *quantised.mxfp4_experts(tmp_path, tmp_path), ep)


def _over_pages(mesh: Mesh, folder: str, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of one sequence with an adapter, without a cache and with one whose latents are absorbed or expanded."""
    base = load_base(folder, device="cpu", dtype="auto", mesh=mesh)
    assert base.kv_shapes[0].latent
    kv, tokens_T = KvCache.for_base(base, 64, 4), tokens_of(9)
    lora = lora_of(base.shard(whole_adapter(base.spec, kind)), 9)
    runs, terms = (
        [TokenRun(9, 0, tuple(kv.allocate(3) or ()))],
        StepTerms(lora.segments, partial(base.sites.terms, lora)),
    )
    expanded = ExpandedAttention(kv.views, runs, [0], paged_attention, terms)
    with torch.no_grad():
        plain, over_pages, by_heads = (
            base.forward(tokens_T, torch.arange(9), attention, lora=lora, keep=None)
            for attention in (ReferenceAttention((0, 9)), kv.attention(runs), expanded)
        )
    return plain, over_pages, by_heads


@pytest.mark.parametrize("kind", [Kind(4), Kind(4, blocks=4)], ids=["nfs", "bd"])
def test_each_rank_absorbs_or_expands_its_heads_of_a_latent_projection(kind: Kind, two: Ranks, tmp_path: Path) -> None:
    tiny_family("deepseek_v3").save_pretrained(tmp_path)
    for plain, *others in two.run(_over_pages, str(tmp_path), kind):
        for got in others:
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_heads_are_cached_whole_where_the_ranks_divide_an_adapters_a(two: Ranks, tmp_path: Path) -> None:
    tiny_family("deepseek_v3").save_pretrained(tmp_path)
    whole = _computed(None, str(tmp_path))
    for found in two.run(_computed, str(tmp_path)):
        assert not any(one.latent for one in found.kv_shapes)
        torch.testing.assert_close(found.logits, whole.logits, rtol=1e-4, atol=1e-4)


def _compare(model: PreTrainedModel, two: Ranks, folder: Path, ep: int = 1) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):
            buffer.copy_(torch.linspace(-1, 1, len(buffer)))  # files have it, though it is no parameter
    model.save_pretrained(folder)
    _check(two, folder, folder, ep)


def _check(two: Ranks, folder: Path, dense: Path, ep: int) -> None:
    """`dense`: the same model as one process loads it."""
    whole = _computed(None, str(dense))
    loss, gradients, norm = whole.gradients
    strategy = "nfs" if whole.kv_shapes[0].latent else "slora"
    for found in two.run(_computed, str(folder), ep, strategy):
        torch.testing.assert_close(found.logits, whole.logits, rtol=1e-4, atol=1e-4)
        assert found.fingerprint == whole.fingerprint
        assert {name: structs.replace(site, holders=1) for name, site in found.sites.items()} == whole.sites
        assert found.kv_shapes == [((heads + 1) // 2, *sizes) for heads, *sizes in whole.kv_shapes]
        assert whole.state_bytes / 2 <= found.state_bytes <= 0.6 * whole.state_bytes, "a half, and one group's inputs"
        assert found.calls == {"all_reduce": found.sums, "all_gather": 1}
        assert found.gradients[0] == pytest.approx(loss, rel=1e-4)
        assert found.gradients[2] == pytest.approx(norm, rel=1e-3)
        assert found.gradients[1].keys() == gradients.keys()
        for site, both in gradients.items():
            for got, expected in zip(found.gradients[1][site], both, strict=True):
                torch.testing.assert_close(
                    got, expected, rtol=1e-3, atol=2e-5 * float(expected.abs().max() + 1), msg=site
                )


@pytest.mark.slow
def test_layers_with_sums_in_the_middle_compile_into_one_graph(tmp_path: Path) -> None:
    """Traced by torch.compile, without inductor, and without the other rank."""
    tiny_family("olmo2").save_pretrained(tmp_path)
    base = load_base(str(tmp_path), device="cpu", dtype="auto", mesh=LoneRank(1, 2))
    FusedBase(base, backend=lambda module, inputs: module.forward).check()
