"""Types that several threads decode for the first time at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

THREADS = """
import os, sys, threading
{before}
sys.setswitchinterval(1e-6)

def race():
    barrier = threading.Barrier(6)

    def work(number):
        barrier.wait()
        {work}

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

for _ in range(60):
    child = os.fork()
    if not child:
        race()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
ROWS = """
from coserve.data.corpus.rows import parse_row
from coserve.core.validation import decoder_of
from coserve.core.schemas.jobs import FinetuneRequest

rows = [{"prompt": "a", "completion": "b"}, {"text": "x"}, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
"""  # noqa: E501
HEADERS = """
from io import BytesIO
from coserve.core.types import LoraSettings
from coserve.lora.files.packed_header import PackedHeader, PackedSite, Stamp, encode_header, read_header

site = PackedSite("q", (1, 2), (2, 1), 1.0, 1, 1, 0)
header = PackedHeader((Stamp(1, 2),), ("a", "b"), "base", "float32", 1, LoraSettings(r=1), (site,), 8, "digest")
content = encode_header(header)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "work"),
    [
        (ROWS, "decoder_of(FinetuneRequest); parse_row(rows[number % 3], 1)"),
        (HEADERS, "assert read_header(BytesIO(content))[0] == header"),
    ],
    ids=["rows", "packed files"],
)
def test_threads_may_decode_a_type_for_the_first_time_at_once(before: str, work: str) -> None:
    """Of processes in which several threads prepare a type at once, some end by SIGSEGV."""
    script = THREADS.format(before=before, work=work)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
