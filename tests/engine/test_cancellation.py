"""Work on a thread, and its cancellation by another one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning

import pytest

from coserve.core.cancellation import Cancellation, Cancelled


def test_what_follows_a_cancellation_waits_for_what_it_must_not_overtake() -> None:
    cancellation = Cancellation()
    with ThreadPoolExecutor(1) as threads:
        with cancellation.postponed():
            cancel = threads.submit(cancellation.cancel)
            with pytest.raises(StillRunning):
                cancel.result(0.1)
        cancel.result(60)
    with pytest.raises(Cancelled), cancellation.postponed():
        pytest.fail("it is cancelled")


def test_a_cancellation_is_told_once() -> None:
    cancellation, told = Cancellation(), list[int]()
    cancellation.on_cancel(lambda: told.append(1))
    cancellation.cancel()
    cancellation.cancel()
    assert told == [1]
    with pytest.raises(Cancelled):
        cancellation.on_cancel(lambda: told.append(2))
    assert told == [1]
