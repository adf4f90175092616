"""The API over a real engine on the bundled base, in this process and on this event loop: nothing is faked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from coserve.core.link.engine import Shutdown
from coserve.core.types import LoraSettings
from coserve.engine.spatial.training_stream import TrainingStream
from coserve.engine.worker import build_engine
from coserve.kernels.lora.types import LoraPair
from coserve.model.base import Base
from coserve.model.load import load_base
from coserve.model.lora import LoraWeights
from tests.support.api_server import Api, serve_api
from tests.support.local_link import local_pair


@cache
def bundled_base() -> Base:
    return load_base("bundled", device="cpu", dtype="float32")


@asynccontextmanager
async def serve_real(
    path: Path, base: Base | None = None, training: TrainingStream | None = None, **settings: Any
) -> AsyncIterator[Api]:
    """As `serve_api`; `base`: the bundled one unless told otherwise; `training`: see `build_engine`."""
    async with serve_api(path, engine=False, **{"kv_tokens": 2048, **settings}) as api:
        ours, theirs = local_pair()
        engine, ready = build_engine(base or bundled_base(), api.config, theirs, training=training)
        running = asyncio.create_task(engine.run())
        await api.service.attach(ours, ready)
        try:
            yield api
        finally:
            ours.send(Shutdown())
            await running


def loud_adapter(seed: int) -> LoraWeights:
    """An adapter that changes what the base says, in its own way."""
    g = torch.Generator().manual_seed(seed)
    sites = {
        name: LoraPair(
            torch.randn(4, site.in_features, generator=g) * 0.1,
            torch.randn(site.out_features, 4, generator=g) * 0.1,
            2.0,
        )
        for name, site in bundled_base().spec.sites.items()
        if name.endswith(("q_proj", "down_proj"))
    }
    return LoraWeights(LoraSettings(r=4), sites)


async def train(api: Api, name: str, **settings: object) -> dict[str, Any]:
    """The job, succeeded."""
    training = {"steps": 4, "batch_tokens": 64, "learning_rate": 0.02}
    body = {"adapter": name, "data": [{"prompt": "Today we", "completion": " sighted land."}], "training": training}
    job = await api.answered(202, "POST", "/finetune", json=body | settings)
    return await api.job_until(job["id"], "succeeded")


async def text(api: Api, adapter: str | None) -> str:
    body = {"prompt": "Today we", "max_tokens": 8, "temperature": 0, "adapter": adapter}
    answer = await api.answered(200, "POST", "/generate", json=body)
    found: str = answer["choices"][0]["text"]
    return found
