"""A change that was begun is completed although its caller is cancelled, and its failure is raised or logged."""

from __future__ import annotations

import asyncio

import pytest

from coserve.core.cancellation import Commits
from coserve.core.errors import AdapterNotFound, MalformedRow, StorageFailed, UnsafeAdapter


async def cut_off(error: BaseException | None) -> None:
    """A change that ends with `error` after its caller was cancelled."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def change() -> None:
        begun.set()
        await go.wait()
        if error is not None:
            raise error

    caller = asyncio.create_task(Commits().run(change()))
    await begun.wait()
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller


@pytest.mark.parametrize("error", [StorageFailed("the disk failed"), TypeError("our own fault")], ids=repr)
async def test_a_failure_whose_client_left_is_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    await cut_off(error)
    (record,) = caplog.records
    assert record.levelname == "ERROR" and record.exc_info is not None and record.exc_info[1] is error


@pytest.mark.parametrize(
    "error",
    [None, AdapterNotFound("none"), MalformedRow("bad", line=1), UnsafeAdapter("a link"), asyncio.CancelledError()],
    ids=repr,
)
async def test_success_and_errors_of_the_request_are_not(
    error: BaseException | None, caplog: pytest.LogCaptureFixture
) -> None:
    await cut_off(error)
    assert not caplog.records
