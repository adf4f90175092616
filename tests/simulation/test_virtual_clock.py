"""The virtual clock itself: time passes only where everything waits."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.virtual_clock import SPIN_LIMIT, Deadlock, Livelock, run_virtual


def test_timers_fire_at_their_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(90 * 86400.0):
                await asyncio.Event().wait()
        return loop.time()

    assert run_virtual(main()) == pytest.approx(90 * 86400.0)


def test_a_deadlock_is_found() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(main())


def test_a_spin_is_found() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns = iter(range(SPIN_LIMIT + 10))  # it ends soon after it is found out: the loop is closed in peace

        def again() -> None:
            if next(turns, None) is not None:
                loop.call_soon(again)

        again()
        await asyncio.sleep(1)

    with pytest.raises(Livelock):
        run_virtual(main())
