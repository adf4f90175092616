"""An engine that starts: it ends when asked to, and what its parts make of a memory plan."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from coserve.admission.memory import Hold, HostAdmission, Start
from coserve.admission.recompute_plan import host_bytes
from coserve.api.engine_client import EngineClient
from coserve.config import Config
from coserve.core.errors import UnsupportedBase
from coserve.core.gpu_memory import GIB
from coserve.core.health import Warming
from coserve.core.link.engine import EngineWarming, Shutdown
from coserve.core.link.link import FromEngine, ToEngine
from coserve.engine import parts as parts_module
from coserve.engine.job_memory import DeviceMemory
from coserve.engine.parts import EngineParts, PoolSize
from coserve.engine.starting import CAPTURING, LOADING, EndedAtStart, StartProgress, follow, until_shutdown
from coserve.engine.worker import build_engine
from coserve.memory.allocator import Reading
from coserve.memory.plan import MemoryPlan
from tests.support.finetuning import job_spec, random_corpus, tiny_base
from tests.support.gpu_memory import COSTS
from tests.support.local_link import LocalLink, local_pair
from tests.support.real_server import bundled_base

ENDS: dict[str, Callable[[LocalLink[ToEngine, FromEngine]], object]] = {
    "shutdown": lambda api: api.send(Shutdown()),
    "gone": lambda api: asyncio.ensure_future(api.close()),
}


@pytest.mark.parametrize("end", ENDS)
async def test_it_does_not_wait_for_kernels_any_more(end: str) -> None:
    """The warm-up's process lives, and never completes a part."""
    api, own = local_pair()
    ours, theirs = socket.socketpair()
    with theirs:
        started = asyncio.create_task(until_shutdown(follow(ours, lambda what, done: None), own))
        await asyncio.sleep(0)
        ENDS[end](api)
        with pytest.raises(EndedAtStart):
            async with asyncio.timeout(60):
                await started


def test_what_a_start_does_and_how_far_it_is_are_told() -> None:
    """To the API process, whose health shows it before there is an engine."""
    now, client, said = 0.0, EngineClient(), list[Warming | None]()

    def send(report: EngineWarming) -> None:
        client.starting(report)
        said.append(client.warming)

    assert (client.status, client.warming) == ("starting", None)
    progress = StartProgress(send, 100, lambda: now)
    progress.compiles("compiling kernels", 60)
    now = 10.0
    progress.compiles("compiling kernels", 80)
    progress.loads("measuring memory")
    progress.captures(1, 4)
    total = 100 + LOADING + CAPTURING
    captured = 100 + LOADING + CAPTURING // 4
    assert said == [
        Warming(60, total, None, "compiling kernels"),  # what was there took no time
        Warming(80, total, 10.0 * (total - 80) / 20, "compiling kernels"),
        Warming(100, total, 10.0 * (total - 100) / 40, "measuring memory"),
        Warming(captured, total, round(10.0 * (total - captured) / (captured - 60), 1), "capturing CUDA graphs"),
    ]
    client.failed("died", started=False)
    assert client.warming is None, "another engine starts from the beginning"


async def test_what_a_start_comes_to_is_passed_on_and_later_messages_are_not_lost() -> None:
    api, own = local_pair()

    async def refused() -> None:
        raise UnsupportedBase("no plan")

    assert await until_shutdown(asyncio.sleep(0, "engine"), own) == "engine"
    with pytest.raises(UnsupportedBase, match="no plan"):
        await until_shutdown(refused(), own)
    api.send(Shutdown())
    assert isinstance(await own.receive(), Shutdown)


def test_a_batch_that_a_step_cannot_hold_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each running request takes a token of a step."""
    for step_tokens, said in ((64, False), (32, True)):
        caplog.clear()
        config = Config(data_dir=tmp_path, max_running=64, step_tokens=step_tokens, kv_tokens=256)
        _, ready = build_engine(bundled_base(), config, local_pair()[1])
        lines = [f"at most {step_tokens} requests run at once, below max_running" in line for line in caplog.messages]
        assert lines.count(True) == said
        assert any("below max_running" in note for note in ready.notes) is said


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
    model, device = parts.memory_model(pool), parts.job_memory(pool)
    assert model is not None and isinstance(device, DeviceMemory)
    assert (model.training, model.costs, model.ranks, model.fully_sharded) == (4 * GIB, COSTS, 2, True)
    use = device.use(0)
    assert (use.training, use.pages, use.weights) == (4 * GIB, 101 << 20, 8 * GIB)
    assert use.planned == 8 * GIB + PLAN.set_aside


def test_without_a_plan_jobs_are_admitted_by_host_memory(parts: EngineParts, tmp_path: Path) -> None:
    spec = job_spec(random_corpus(), "one")
    size = host_bytes(spec, parts.base.spec, ranks=1, fully_sharded=False)
    config = Config(data_dir=tmp_path, pinned_memory_bytes=2 * size - 1)
    pool, own = PoolSize(1000), EngineParts(parts.base, config)
    assert own.memory_model(pool) is None
    memory = own.job_memory(pool)
    assert isinstance(memory, HostAdmission)
    assert memory.admit(spec) == Start()
    assert isinstance(memory.admit(job_spec(random_corpus(), "two")), Hold)
    memory = parts.job_memory(pool)  # half of the machine's
    assert isinstance(memory, HostAdmission) and memory.admit(spec) == Start()
