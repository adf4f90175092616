"""The size of an adapter as it is served, from its settings alone."""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
import pytest

from coserve.admission.pool import check_can_be_served, served_bytes
from coserve.core.errors import BY_CODE, AdapterTooLarge
from coserve.core.gpu_memory import PoolShape
from coserve.core.types import LoraSettings, SiteSpec
from tests.support.gpu_memory import BASE

PAGE = 1 << 12


def size(settings: LoraSettings, device: str = "cpu", ranks: int = 1, *, slora: bool = False) -> int:
    return served_bytes(settings, msgspec.structs.replace(BASE, device=device), ranks=ranks, fully_sharded=slora)


def test_a_pool_needs_one_page_more_than_the_adapter() -> None:
    settings = LoraSettings(r=16)
    pages = -(-size(settings) // PAGE)
    for more, fits in ((0, False), (1, True)):
        pool = PoolShape(pages + more, PAGE, 16)

        def check(pool: PoolShape = pool) -> None:
            check_can_be_served("poet", settings, BASE, pool, ranks=1, fully_sharded=False, field="lora")

        if fits:
            check()
            continue
        told = rf"pool of {pages} pages \({16 * pages} tokens.*'poet' of {pages} pages.*--kv-tokens {16 * (pages + 1)} "
        with pytest.raises(AdapterTooLarge, match=told) as caught:
            check()
        assert caught.value.field == "lora"
    assert BY_CODE["adapter_too_large"] is AdapterTooLarge


def test_a_prefix_beside_lora_needs_pages_of_the_request_too() -> None:
    prefixes = {f"layers.{layer}.prefix": SiteSpec(1024, 1024, layer) for layer in range(BASE.layers)}
    base, settings = msgspec.structs.replace(BASE, prefixes=prefixes), LoraSettings(r=16, prefix_tokens=33)
    both, lora, prefix = (
        served_bytes(one, base, ranks=1, fully_sharded=False)
        for one in (settings, LoraSettings(r=16), LoraSettings(r=33, cartridge=True))
    )
    assert both == lora + prefix and prefix > 0
    pages = -(-both // PAGE)
    for more, fits in ((3, False), (4, True)):
        pool = PoolShape(pages + more, PAGE, 16)
        with nullcontext() if fits else pytest.raises(AdapterTooLarge):
            check_can_be_served("both", settings, base, pool, ranks=1, fully_sharded=False, field=None)


def test_sizes_follow_ranks_targets_and_shards() -> None:
    whole = size(LoraSettings(r=16))
    assert size(LoraSettings(r=32)) == 2 * whole
    assert size(LoraSettings(r=16, targets=BASE.default_targets[:1])) < whole
    assert size(LoraSettings(r=16), ranks=2, slora=True) == whole // 2
    assert whole // 2 < size(LoraSettings(r=16), ranks=2) < whole
    assert size(LoraSettings(r=16 * 1024)) == 1024 * whole, "imported adapters may have any rank"
    blocks = LoraSettings(r=16, bd_blocks=2)
    assert size(blocks) < whole
    assert size(blocks, "cuda") == whole, "one GPU has the zeros between blocks, too"
    assert size(blocks, "cuda", ranks=2) == size(blocks) // 2
