"""Runs a profile in its own process, as commands import no torch."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import msgspec

from coserve.core.errors import ConfigError, CoserveError, InternalError, InvalidRequest, StartupError, UnsupportedBase
from coserve.core.processes import spawn_child
from coserve.engine.profile_request.messages import Failed, Finished, Message, Step
from coserve.engine.profile_request.report import ProfileReport
from coserve.engine.profile_request.request import ProfileRequest

MODULE = "coserve.engine.profiling.process"
ERRORS: dict[str, type[CoserveError]] = {
    kind.code: kind for kind in (InvalidRequest, ConfigError, UnsupportedBase, StartupError)
}


def run_profile(request: ProfileRequest, progress: Callable[[Step], None]) -> ProfileReport:
    """Run the profile; blocks until it is complete. An exception of `progress` ends the process and is raised.

    Raises:
        UnsupportedBase, InvalidRequest: errors about the base and its adapters.
        StartupError: the process died.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn_child(MODULE, theirs, msgspec.json.encode(request))
    try:
        with ours:
            for message in _messages(ours):
                match message:
                    case Step():
                        progress(message)
                    case Finished(report=report):
                        return report
                    case Failed(code=code, message=text):
                        raise ERRORS.get(code, InternalError)(text)
    finally:
        process.kill()
        process.wait()
    raise StartupError("the profile's process died")


def _messages(sock: socket.socket) -> Iterator[Message]:
    with sock.makefile("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):  # the process was killed while it wrote
                return
            yield msgspec.json.decode(line, type=Message)
