"""The fork server of a warm-up: `python -m coserve.engine.warming.worker_process FD`. It imports torch, transformers and the
compiler once, and forks a worker for each request of `warmup.fork_client.ForkServer`.

FD is one end of a socket pair. A worker has a socket of its own: it reads the `WarmUpTask` and then `DoPart` lines from it, and
writes `PartReport` lines.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, Protocol

from coserve.engine.warming.fast_imports import fast_imports
from coserve.processes import PARENT, adopt_orphans, obey_parent
from coserve.warmup.fork_client import ANSWER, NEW, PID

NICENESS = 10
"""The engine and the API process go first where there are too few processor cores."""
ALONE = "alone"
"""The second argument of a process that is a worker itself."""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""torch then counts GPUs by NVML where it can."""
CUDA_ERROR_NOT_INITIALIZED = 3
"""What libcuda says in a process forked from one that had initialised it."""


def serve_forks(control: socket.socket, work: Callable[[socket.socket], None], *, anew: bool = False) -> None:
    """Fork processes that run `work` until the other end of `control` closes. `anew`: whether each imports everything itself."""
    server = os.getpid()
    with suppress(ConnectionError):
        while True:
            request, descriptors, *_ = socket.recv_fds(control, PID.size, 1)
            if not request:
                return
            (pid,) = PID.unpack(request)
            if pid == NEW:
                with socket.socket(fileno=descriptors[0]) as sock:
                    pid = os.fork()
                    if pid == 0:
                        control.close()
                        _work_and_exit(sock, work, server)
                    with suppress(OSError):  # it has done so itself
                        os.setpgid(pid, pid)
            else:
                _end(pid)
            control.send(ANSWER.pack(pid, anew))


def _end(pid: int) -> None:
    """Kill a worker, which may have ended (its pid is kept until it is waited for), and what it has forked."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-pid, 0)


def _work_and_exit(sock: socket.socket, work: Callable[[socket.socket], None], server: int) -> None:
    status = 1
    try:
        os.setpgid(0, 0)  # a group with the processes that it forks
        obey_parent(server)
        work(sock)
        status = 0
    except BaseException:  # noqa: BLE001 - the stack below is the server's
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


class Driver(Protocol):
    """What is called of libcuda."""

    def cuInit(self, flags: int) -> int: ...  # noqa: N802 - NVIDIA's name


def fork_broke_cuda(load: Callable[[str], Driver] = ctypes.CDLL) -> bool:
    """In a forked process: whether CUDA was initialised before the fork, by whatever an import did, and cannot be used here. `load`: loads
    a library; raises `OSError` where there is none."""
    import torch

    if torch.cuda._is_in_bad_fork():
        return True
    try:
        return load("libcuda.so.1").cuInit(0) == CUDA_ERROR_NOT_INITIALIZED
    except OSError:
        return False


def forks_break_cuda(broken: Callable[[], bool] = fork_broke_cuda) -> bool:
    """Whether a process forked from this one cannot use CUDA: tried with one that asks `broken`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        with suppress(BaseException):
            status = int(broken())
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


@contextmanager
def asking_nvml() -> Iterator[None]:
    """An import that asks torch for GPUs inside does not initialise CUDA, which would break forks."""
    before = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NVML_CHECK]
        else:
            os.environ[NVML_CHECK] = before


def work_anew(sock: socket.socket) -> NoReturn:
    """`work` in a new interpreter, in place of a forked one."""
    os.set_inheritable(sock.fileno(), True)
    os.environ[PARENT] = str(os.getppid())
    module = "coserve.engine.warming.worker_process"
    os.execv(sys.executable, [sys.executable, "-m", module, str(sock.fileno()), ALONE])  # noqa: S606 - our own module


def main() -> None:
    obey_parent()
    adopt_orphans()  # those of workers that die, which `_end` waits for
    # Threads of numeric libraries, which their own handlers of fork take care of; Python 3.12 warns of any.
    warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
    alone = ALONE in sys.argv
    if not alone:
        os.nice(NICENESS)
    with fast_imports(), asking_nvml():
        import torch._inductor.compile_fx  # noqa: F401 - every worker compiles, sooner or later

        from coserve.engine.warming.worker import work
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        if alone:
            work(sock)
        elif forks_break_cuda():
            serve_forks(sock, work_anew, anew=True)
        else:
            serve_forks(sock, work)


if __name__ == "__main__":
    main()
