"""Whether the GPUs that share the base can share the blocks of a job's adapter: the rule agrees with how they partition
it."""

from __future__ import annotations

import msgspec
import pytest
import torch

from coserve.admission.ranks import blocks_fit, check_ranks, unmet_need
from coserve.admission.shapes import lora_shapes
from coserve.core.errors import InvalidRequest
from coserve.core.training.settings import Optimizer
from coserve.core.types import BaseSpec, LoraSettings, SiteSpec
from coserve.kernels.lora.types import LoraPair
from coserve.lora.files.bdlora import parallel_style
from coserve.model.parallel.lora import Strategy, partition_pair
from coserve.model.parallel.partition import Features, Parallel, SitePartition
from tests.support.fake_engine import make_base
from tests.support.records import make_job

SIZE = 8 * 43 * 3
LAYER = "model.layers.0."
SITES = "self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "self_attn.qkv_proj"
HEADS = 2
"""Of keys: with more GPUs, several share one."""


def base_of(site: str) -> BaseSpec:
    return msgspec.structs.replace(make_base(10), sites={LAYER + site: SiteSpec(SIZE, SIZE, 0)})


def partitioned(site: str, ranks: int) -> SitePartition:
    """As `parallel.families` partitions such a site."""
    whole, even = Features.whole(SIZE, ranks), Features.even(SIZE, ranks)
    if site.endswith("down_proj"):
        return SitePartition(Parallel.ROW, even, whole)
    outputs = {
        "self_attn.k_proj": Features.heads(HEADS, SIZE // HEADS, ranks),
        "self_attn.qkv_proj": Features.joined([Features.even(SIZE // 3, ranks)] * 3),
    }
    return SitePartition(Parallel.COLUMN, whole, outputs.get(site, even))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("site", SITES)
def test_the_rule_is_that_of_the_partition(site: str, ranks: int) -> None:
    base = base_of(site)
    for blocks in (2, 3, 4, 6, 8, 12, 24, 43):
        for in_a, in_b in ((blocks, 1), (1, blocks)):
            pair = LoraPair(
                torch.empty(SIZE, SIZE // in_a), torch.empty(SIZE, SIZE // in_b), 1.0, a_blocks=in_a, b_blocks=in_b
            )
            partition = partition_pair(partitioned(site, ranks), pair, Strategy.NFS)
            keeps = (in_a, in_b) == (partition.whole_a_blocks, partition.whole_b_blocks)
            named = {"targets_bd_a": (site,) if in_a > 1 else (), "targets_bd_b": (site,) if in_b > 1 else ()}
            settings = LoraSettings(r=SIZE, targets=(site,), bd_blocks=blocks, **named)
            fit = blocks_fit(settings, base, ranks)
            if site.endswith("k_proj") and ranks > HEADS:
                assert keeps or not fit, (blocks, in_a, in_b)
            else:
                assert fit is (keeps or ranks == 1), (blocks, in_a, in_b)


@pytest.mark.parametrize("strategy", [Strategy.NFS, Strategy.SLORA])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("site", SITES)
def test_what_is_planned_for_a_rank_is_what_it_holds(site: str, ranks: int, strategy: Strategy) -> None:
    """Exactly, unless blocks are larger than a rank's shard, or the site is a fused projection: then never less."""
    partition = partitioned(site, ranks)
    spec = SiteSpec(SIZE, SIZE, 0, holders=partition.outputs.holders)
    base, style = msgspec.structs.replace(make_base(10), sites={LAYER + site: spec}), parallel_style(LAYER + site)
    for rank, blocks in ((8, 1), (12, 1), (24, 2), (24, 3), (24, 8), (24, 24)):
        in_a, in_b = (blocks, 1) if partition.sums else (1, blocks)
        pair = LoraPair(
            torch.empty(rank, SIZE // in_a), torch.empty(SIZE, rank // in_b), 1.0, a_blocks=in_a, b_blocks=in_b
        )
        own = partition_pair(partition, pair, strategy)
        settings = LoraSettings(r=rank, targets=(site,), bd_blocks=blocks)
        if blocks > 1 and style is None:
            settings = msgspec.structs.replace(settings, targets_bd_b=(site,))
        (planned,) = lora_shapes(settings, base, ranks=ranks, fully_sharded=strategy is Strategy.SLORA)
        held = own.a.local, own.b.local
        if style is not None and (blocks == 1 or blocks % ranks == 0):
            assert (planned.a, planned.b) == held, (rank, blocks)
        assert planned.a >= held[0] and planned.b >= held[1], (rank, blocks)


def test_plain_adapters_fit_any_number() -> None:
    assert blocks_fit(LoraSettings(r=3), base_of("self_attn.q_proj"), 8)


def test_the_field_and_both_numbers_are_named() -> None:
    settings = LoraSettings(r=43, targets=("down_proj",), bd_blocks=43)
    with pytest.raises(InvalidRequest, match=r"expected .*--tp 2.*, got 43") as caught:
        check_ranks(settings, base_of("mlp.down_proj"), ranks=2, field="lora.bd_blocks")
    assert caught.value.field == "lora.bd_blocks"
    check_ranks(settings, base_of("mlp.down_proj"), ranks=1, field="lora.bd_blocks")
    unsharded = LoraSettings(r=2, targets=("down_proj",), bd_blocks=2, targets_bd_b=("down_proj",))
    with pytest.raises(InvalidRequest, match="only B of column-parallel sites and A of row-parallel ones"):
        check_ranks(unsharded, base_of("mlp.down_proj"), ranks=2, field="lora.bd_blocks")


def test_what_an_accepted_job_needs() -> None:
    base, job = base_of("mlp.down_proj"), make_job("job-1").spec
    blocks = msgspec.structs.replace(job, lora=LoraSettings(r=43, targets=("down_proj",), bd_blocks=43))
    training = msgspec.structs.replace(job.training, optimizer=Optimizer.PAGED_ADAMW)
    paged = msgspec.structs.replace(job, training=training)
    assert [unmet_need(each, base, ranks=1) for each in (job, blocks, paged)] == [None] * 3
    assert [unmet_need(each, base, ranks=4) for each in (job, blocks, paged)] == [
        None,
        "needs a --tp that its 43 blocks fit; this daemon has 4",
        "needs another daemon: paged_adamw is not supported with --tp 4: use adamw",
    ]
