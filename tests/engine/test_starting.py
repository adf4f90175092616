"""An engine that waits for its kernels ends when it is asked to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from coserve.api.engine_client import EngineClient
from coserve.config import Config
from coserve.engine.starting import EndedAtStart, until_shutdown
from coserve.engine.warming.client import WarmUpClient
from coserve.engine.warming.upgrade import CAPTURING, LOADING, report_progress
from coserve.engine.worker import build_engine
from coserve.errors import UnsupportedBase
from coserve.link import EngineWarming, FromEngine, LocalLink, Shutdown, ToEngine, local_pair
from coserve.warmup.messages import Progress, WarmUpTask
from coserve.warmup.parts import PROFILE
from tests.support.real_server import bundled_base

ENDS: dict[str, Callable[[LocalLink[ToEngine, FromEngine]], object]] = {
    "shutdown": lambda api: api.send(Shutdown()),
    "gone": lambda api: asyncio.ensure_future(api.close()),
}


@pytest.mark.parametrize("end", ENDS)
async def test_it_does_not_wait_for_kernels_any_more(end: str, tmp_path: Path) -> None:
    """The warm-up's process lives, and never completes a part."""
    api, own = local_pair()
    ours, theirs = socket.socketpair()
    warm = WarmUpClient(WarmUpTask("{}", str(tmp_path), {}, "shape", 1))
    with theirs:
        await warm.listen(ours)
        started = asyncio.create_task(until_shutdown(warm.wait_for_parts((PROFILE,)), own))
        await asyncio.sleep(0)
        ENDS[end](api)
        with pytest.raises(EndedAtStart):
            async with asyncio.timeout(60):
                await started
        await warm.close()


async def test_the_progress_of_kernels_that_it_waits_for_is_told(tmp_path: Path) -> None:
    """To the API process, whose health shows it before there is an engine."""
    api, own = local_pair()
    ours, theirs = socket.socketpair()
    warm, client = WarmUpClient(WarmUpTask("{}", str(tmp_path), {}, "shape", 1)), EngineClient()
    telling = asyncio.create_task(report_progress(own, warm))
    assert (client.status, client.warming) == ("starting", None)
    with theirs:
        await warm.listen(ours)
        for done in (0, 50):
            theirs.sendall(msgspec.json.encode(Progress(done, 100, [])) + b"\n")
            report = await api.receive()
            assert isinstance(report, EngineWarming)
            client.starting(report)
            shown = client.warming
            assert client.status == "starting" and shown is not None
            assert (shown.done, shown.total, shown.seconds_left is None) == (done, 100 + LOADING + CAPTURING, done == 0)
        client.failed("died", started=False)
        assert client.warming is None, "another engine starts from the beginning"
        await warm.close()
    telling.cancel()


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
