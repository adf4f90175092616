"""Processes without a GPU compile what a kernel's arguments need, so that Triton finds it on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILED = """
import os
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import torch
from triton import knobs
from triton.runtime import driver

from coserve.kernels.gpu.compile_process import compiled_by
from coserve.kernels.gpu.launcher import Launcher, compile_only
from tests.support.kernels import NoGpu, scale


processes = ProcessPoolExecutor(2, get_context("fork"))
driver.set_active(NoGpu())
launch, x = Launcher(scale), torch.empty(64, dtype=torch.bfloat16)

def launch_all():
    for length in (1, 7, 16, 32):  # 16 and 32 are one specialization
        for wide in (False, True):
            launch((1, 1, 1), (x, x), (length,), FACTOR=2.0, WIDE=wide, KIND=None, BLOCK=16, num_warps=1)

found = []
with compile_only(processes, lambda name, seconds: found.append(name)):
    launch_all()
    launch_all()
print(*found)
launch = Launcher(scale)
heard = []
knobs.compilation.listener = lambda *, cache_hit, **_: heard.append(cache_hit)
with compile_only(None):
    launch_all()
print(len(heard), all(heard))
try:  # what one compilation raises, others hear of: a capture leaves its graph out whatever is raised inside
    with compile_only(processes):
        with suppress(Exception):
            launch((1, 1, 1), (x, x), (3,), FACTOR=2.0, WIDE="no", KIND=None, BLOCK=15, num_warps=1)
        for length in (1, 7):
            with suppress(Exception):
                launch((1, 1, 1), (x, x), (length,), FACTOR=3.0, WIDE=True, KIND=None, BLOCK=16, num_warps=1)
except Exception as error:
    print("raised", "power of 2" in str(error))
launch = Launcher(scale)
for process in list(processes._processes.values()):
    process.kill()
    process.join()
try:
    with compile_only(processes), suppress(Exception):
        launch((1, 1, 1), (x, x), (1,), FACTOR=4.0, WIDE=True, KIND=None, BLOCK=16, num_warps=1)
except BrokenExecutor:
    print("broken")
"""


@pytest.mark.slow
def test_processes_compile_each_specialization_once_and_triton_finds_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.stdout.splitlines() == ["scale" + " scale" * 5, "6 True", "raised True", "broken"], done.stderr
