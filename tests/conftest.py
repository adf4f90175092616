"""Set before anything imports Triton: without a GPU its kernels run in its interpreter. No test is timed."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.ranks import Ranks

# What is loaded and collected stays until the end: looked through once, it costs later collections of garbage nothing.
gc.disable()

# A shell starts what runs behind an & deaf to Ctrl-C, and so the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As in the engine's process (`engine.threads`): a row of a product has the same bits whatever the other rows are.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Which cases of those that take turns are run by `make test-all`: the same in every worker.
os.environ.setdefault("TEST_TURN", str(datetime.now(UTC).timetuple().tm_yday))
from tests.support.examples import leave_for_other_days, marks_on_days  # which reads it

settings.register_profile("coserve", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("coserve"), max_examples=10)
settings.register_profile("long", settings.get_profile("coserve"), max_examples=100)
settings.load_profile("coserve")


def pytest_configure(config: pytest.Config) -> None:
    """Before tests import Triton. xdist's first process, which runs no test, need not wait for torch."""
    if config.getoption("numprocesses", None):
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_for_other_days(items)


def pytest_collection_finish() -> None:
    from tests.support.triton_interpreter import make_faster  # not before Triton's setting

    make_faster()
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a module imported and traced stays, too: a full collection, as in each measurement of memory, would go
    through all of it."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _logging_of_each_test() -> Iterator[None]:
    """A command that a test runs in this process sets up logging, to a stream that is closed after it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[Callable[[], Ranks]]:
    """Two ranks for tests of all files, since they take seconds to start."""
    from tests.support.ranks import Ranks  # not before Triton's setting

    with ExitStack() as stack:
        started: list[Ranks] = []

        def usable() -> Ranks:
            if not started or not started[-1].usable:
                started.append(stack.enter_context(Ranks(2)))
            return started[-1]

        yield usable


@pytest.fixture
def two(shared_ranks: Callable[[], Ranks]) -> Ranks:
    """Two ranks."""
    return shared_ranks()


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=marks_on_days(3)), pytest.param(8, marks=[pytest.mark.slow, pytest.mark.long])],
)
def ranks(request: pytest.FixtureRequest, shared_ranks: Callable[[], Ranks]) -> Iterator[Ranks]:
    """Two ranks; in slow tests four on one of six days, in long ones eight, too."""
    if request.param == 2:
        yield shared_ranks()
        return
    from tests.support.ranks import Ranks

    with Ranks(request.param) as found:
        yield found
