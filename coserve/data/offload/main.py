"""The helper process: `python -m coserve.data.offload.main FD LOG_LEVEL LOG_FORMAT`. It reads calls from socket FD and
answers them in order.

It ends when the other end closes. It never imports torch and gets no secrets.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import sys
import time
from pathlib import Path

import msgspec

from coserve.core.errors import CoserveError, InternalError
from coserve.core.link.channel import Channel
from coserve.core.link.link import PeerLost
from coserve.core.logs import LogSettings, set_up_logging
from coserve.core.processes import obey_parent
from coserve.data.offload.protocol import Call, Reply, Task, TaskContext, arguments_of, failure_of, find
from coserve.data.pretrained import sandbox
from coserve.data.pretrained.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class _Replies:
    """Sends replies. `progress` sends a heartbeat at most once in `heartbeat` seconds."""

    def __init__(self, channel: Channel[Reply, Call]) -> None:
        self._channel, self._last = channel, time.monotonic()
        self.heartbeat = 0.0

    def progress(self) -> None:
        if time.monotonic() - self._last >= self.heartbeat:
            self.send(Reply(working=True))

    def send(self, reply: Reply) -> None:
        self._last = time.monotonic()
        self._channel.send(reply)


def _peak_memory() -> int:
    """Peak resident memory of this process in bytes.

    On Linux not from `ru_maxrss`: a new process inherits its parent's value.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _run(context: TaskContext, name: str, arguments: bytes) -> Reply:
    task: Task = find(name)
    try:
        given = msgspec.msgpack.decode(arguments, type=arguments_of(task))
        result = msgspec.msgpack.encode(task(context, **msgspec.structs.asdict(given)))
    except CoserveError as error:
        return Reply(failure=failure_of(error), memory=_peak_memory())
    except Exception:  # our own fault in one call: the process takes the next one
        log.exception("task %s failed", name)
        return Reply(failure=failure_of(InternalError("internal error")), memory=_peak_memory())
    return Reply(memory=_peak_memory(), result=result)


def main() -> None:
    set_up_logging("helper", LogSettings(level=sys.argv[2], format=sys.argv[3]))
    obey_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that hits one of its own limits writes no core dump
    channel = Channel[Reply, Call](socket.socket(fileno=int(sys.argv[1])), msgspec.msgpack.Decoder(Call))
    replies = _Replies(channel)
    with contextlib.suppress(PeerLost):
        setup = channel.receive_bytes(channel.receive().size)
        context = TaskContext(Tokenizer.from_state(setup, sandbox.limits), replies.progress)
        while True:
            call = channel.receive()
            arguments = channel.receive_bytes(call.size)
            replies.heartbeat = call.heartbeat
            replies.send(Reply(working=True))  # from here on, another process must not run the task
            replies.send(_run(context, call.task, arguments))
            del arguments


if __name__ == "__main__":
    main()
