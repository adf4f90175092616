"""Types that several threads decode for the first time at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

THREADS = """
import sys, threading
from coserve.data.corpus.rows import parse_row
from coserve.core.validation import decoder_of
from coserve.core.schemas import FinetuneRequest

rows = [{"prompt": "a", "completion": "b"}, {"text": "x"}, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
barrier = threading.Barrier(6)
sys.setswitchinterval(1e-6)

def work(number):
    barrier.wait()
    decoder_of(FinetuneRequest)
    parse_row(rows[number % 3], 1)

threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
for each in threads:
    each.start()
for each in threads:
    each.join()
"""  # noqa: E501


@pytest.mark.slow
def test_threads_may_decode_a_type_for_the_first_time_at_once() -> None:
    """Without `decoder_of` one process of five ended by SIGSEGV."""
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False, timeout=240)
        assert (done.returncode, done.stderr) == (0, "")
