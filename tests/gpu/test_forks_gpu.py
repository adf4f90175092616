"""A warm-up's workers are forked from a process with all imports, and use the GPU. Run with `pytest -m gpu`."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

FORKED = """
import os
from coserve.engine.warming import worker_process

def work():
    import torch
    assert torch.ones(3, device="cuda").sum().item() == 3
    print("worked on the GPU", flush=True)

def serve_forks(sock, run, anew=False):
    print("forked from a process that uses CUDA" if anew else "forked")
    if os.fork() == 0:
        work()
        os._exit(0)
    os.wait()

worker_process.serve_forks = serve_forks
worker_process.main()
"""


def test_a_forked_worker_uses_the_gpu_without_new_imports() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", FORKED, str(theirs.fileno())]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, pass_fds=(theirs.fileno(),)
        )
    assert "worked on the GPU" in done.stdout, done.stderr
    assert "uses CUDA" not in done.stdout
