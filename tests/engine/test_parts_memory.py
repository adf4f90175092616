"""What the engine's parts make of a memory plan: the model that the API process gets, and the device that admits
jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from coserve.config import Config
from coserve.core.gpu_memory import GIB
from coserve.engine import parts as parts_module
from coserve.engine.parts import EngineParts, PoolSize
from coserve.memory.allocator import Reading
from coserve.memory.plan import MemoryPlan
from tests.support.finetuning import tiny_base
from tests.support.gpu_memory import COSTS

PLAN = MemoryPlan(
    pages=100, page_bytes=1 << 20, taken=GIB, step=GIB, training=3 * GIB, jobs=GIB, graphs=GIB, costs=COSTS, error=0.0
)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> EngineParts:
    folder: Path = tmp_path_factory.mktemp("data")
    return EngineParts(tiny_base("llama"), Config(data_dir=folder, lora_sharding="slora", tp=2))


def test_jobs_have_what_the_plan_sets_aside_for_them(parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> None:
    now = Reading(total=80 * GIB, free=60 * GIB, reserved=10 * GIB, allocated=9 * GIB, peak=9 * GIB)
    monkeypatch.setattr(parts_module, "read_device", lambda _: now)
    pool = PoolSize(100 * 16, PLAN, loaded=8 * GIB)
    model, device = parts.memory_model(pool), parts.device_memory(pool)
    assert model is not None and device is not None
    assert (model.training, model.costs, model.ranks, model.fully_sharded) == (4 * GIB, COSTS, 2, True)
    use = device.use(0)
    assert (use.training, use.pages, use.weights) == (4 * GIB, 101 << 20, 8 * GIB)
    assert device.planned == use.planned == 8 * GIB + PLAN.set_aside


def test_without_a_plan_jobs_are_not_admitted_by_memory(parts: EngineParts) -> None:
    pool = PoolSize(1000)
    assert parts.memory_model(pool) is None
    assert parts.device_memory(pool) is None
