"""The profile's process: `python -m coserve.engine.profiling.process FD`, with a `ProfileRequest` as JSON on standard
input.

FD is one end of a socket pair, to which the process writes `profile_request.messages`, one JSON object a line.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback

import msgspec

from coserve.core.errors import CoserveError
from coserve.core.processes import obey_parent
from coserve.engine.profile_request.messages import Failed, Finished, Message
from coserve.engine.profile_request.request import ProfileRequest
from coserve.engine.warming.fast_imports import fast_imports


def main() -> None:
    obey_parent()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProfileRequest)
    sock = socket.socket(fileno=int(sys.argv[1]))

    def send(message: Message) -> None:
        sock.sendall(msgspec.json.encode(message) + b"\n")

    with fast_imports():
        from coserve.engine.profiling.run import profile  # imports torch and transformers

    try:
        send(Finished(report=profile(request, send)))
    except CoserveError as error:
        send(Failed(code=error.code, message=str(error)))
    except Exception as error:  # noqa: BLE001 - the command shows it in one line
        if os.environ.get("COSERVE_DEBUG"):
            traceback.print_exc()
        send(Failed(code="internal_error", message=f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main()
