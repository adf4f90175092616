"""Refuses adapters that this daemon could never serve."""

from __future__ import annotations

import asyncio

from coserve.admission.pool import check_can_be_served
from coserve.config import Config
from coserve.core.gpu_memory import PoolShape
from coserve.core.types import BaseSpec, LoraSettings


async def refuse_too_large(
    adapter: str, settings: LoraSettings, base: BaseSpec, pool: PoolShape, config: Config, *, field: str | None
) -> None:
    """Run `check_can_be_served` off the event loop: settings may have a pattern for each of hundreds of sites."""
    await asyncio.to_thread(
        check_can_be_served,
        adapter,
        settings,
        base,
        pool,
        ranks=config.tp,
        fully_sharded=config.lora_sharding == "slora",
        field=field,
    )
