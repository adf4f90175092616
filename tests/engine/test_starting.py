"""An engine that waits for its kernels ends when it is asked to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from coserve.api.engine_client import EngineClient
from coserve.config import Config
from coserve.core.errors import UnsupportedBase
from coserve.core.health import Warming
from coserve.core.link.engine import EngineWarming, Shutdown
from coserve.core.link.link import FromEngine, ToEngine
from coserve.engine.starting import CAPTURING, LOADING, EndedAtStart, StartProgress, follow, until_shutdown
from coserve.engine.worker import build_engine
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
