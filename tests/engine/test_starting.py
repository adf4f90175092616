"""An engine that waits for its kernels ends when it is asked to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from coserve.engine.starting import EndedAtStart, until_shutdown
from coserve.engine.warming.client import WarmUpClient
from coserve.errors import UnsupportedBase
from coserve.link import FromEngine, LocalLink, Shutdown, ToEngine, local_pair
from coserve.warmup.messages import WarmUpTask
from coserve.warmup.parts import PROFILE

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


async def test_what_a_start_comes_to_is_passed_on_and_later_messages_are_not_lost() -> None:
    api, own = local_pair()

    async def refused() -> None:
        raise UnsupportedBase("no plan")

    assert await until_shutdown(asyncio.sleep(0, "engine"), own) == "engine"
    with pytest.raises(UnsupportedBase, match="no plan"):
        await until_shutdown(refused(), own)
    api.send(Shutdown())
    assert isinstance(await own.receive(), Shutdown)
