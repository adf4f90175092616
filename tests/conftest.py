"""Set before anything imports Triton: without a GPU its kernels run in its interpreter. No test is timed."""

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts what runs behind an & deaf to Ctrl-C, and so the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("coserve", deadline=None)
settings.register_profile("fast", settings.get_profile("coserve"), max_examples=20)
settings.load_profile("coserve")


@pytest.fixture(autouse=True)
def _logging_of_each_test() -> Iterator[None]:
    """A command that a test runs in this process sets up logging, to a stream that is closed after it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(handler)
