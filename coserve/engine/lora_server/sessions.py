"""A LoRA server that several engines use.

Each connection is an engine's, and has a thread, a stream, slots and a transport of its own: an engine that hangs or
dies leaves the others alone. Only pairs are shared.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from contextlib import closing, suppress
from functools import partial

import msgspec
import torch

from coserve.core.link.link import PeerLost
from coserve.core.link.lora_servers import REFUSED, Hello, ListenerSettings, receive_hello, send_hello
from coserve.core.logs import log_event, set_up_logging
from coserve.engine.lora_server.ipc import ServerEnd, SharedPage, Streams
from coserve.engine.lora_server.messages import EnginesConnected
from coserve.engine.lora_server.server import ServerChannel, make_channel, serve_engine, start_message, take_page
from coserve.engine.lora_server.shared_pairs import SharedPairs

log = logging.getLogger(__name__)

ENGINES_ERRORS = ConnectionError, LookupError, torch.OutOfMemoryError
"""Errors that end the session of one engine, and not the server."""
AGAIN = 0.02
"""Seconds until a GPU whose engine is gone is released once more: the engine's GPU may have written a number since."""


def serve_engines(sock: socket.socket, settings: ListenerSettings) -> None:
    """Serve every engine that connects. Raises `SystemExit` with the status `REFUSED` for a device that this machine
    lacks."""
    set_up_logging(f"lora-server-{settings.index}", settings.logs)
    try:
        sessions = Sessions(device := device_of(settings))
    except ValueError as error:
        log.error("%s", error)
        raise SystemExit(REFUSED) from error
    log_event(log, "LoRA server listens", at=sock.getsockname(), device=str(device))
    while True:
        connection, _ = sock.accept()
        threading.Thread(target=sessions.serve, args=(connection,), name="engine", daemon=True).start()


def device_of(settings: ListenerSettings) -> torch.device:
    """Return a server's device: one of the last GPUs, or the CPU. Raises `ValueError` if there are too few GPUs."""
    gpus = torch.cuda.device_count()
    if settings.device == "cpu" or (settings.device == "auto" and not gpus):
        return torch.device("cpu")
    if settings.servers > gpus:
        raise ValueError(f"servers: expected at most {gpus}, the GPUs of this machine, got {settings.servers}")
    return torch.device("cuda", gpus - settings.servers + settings.index)


class Sessions:
    """The engines of a server, and the adapters that they share."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams, self._pairs = device, Streams(device), SharedPairs()
        self._lock, self._channels = threading.Lock(), list[ServerChannel]()

    def serve(self, connection: socket.socket) -> None:
        """Serve an engine until it is gone. Errors that are not its own end the process, which is started again."""
        channel = make_channel(connection)
        try:
            with closing(channel):
                theirs, files = receive_hello(connection)
                page = take_page(files[0]) if files else None
                send_hello(connection)
                if theirs != Hello():
                    raise ConnectionError(f"it is of {theirs}, and this server of {Hello()}")
                self._serve(channel, connection, page)
        except ENGINES_ERRORS as error:
            log_event(log, "an engine has left", reason=str(error) or "it has closed the connection")
            if not isinstance(error, ConnectionError):
                log.warning("an engine's session has failed", exc_info=error)
        except BaseException:
            log.critical("the LoRA server ends by a fault", exc_info=True)
            logging.shutdown()
            os._exit(1)

    def _serve(self, channel: ServerChannel, connection: socket.socket, page: SharedPage | None) -> None:
        message = msgspec.structs.replace(start_message(channel), device=str(self._device))
        channel.limit_sends(message.deadline)
        join = partial(self._join, channel)
        try:
            with closing(Watch(connection, message.deadline)) as watch, self._streams.one():
                serve_engine(channel, message, page, self._pairs.reader, join, watch.look_at)
        finally:
            self._leave(channel)

    def _join(self, channel: ServerChannel) -> None:
        with self._lock:
            self._channels.append(channel)
            self._tell()

    def _leave(self, channel: ServerChannel) -> None:
        with self._lock:
            if channel in self._channels:
                self._channels.remove(channel)
                self._tell()

    def _tell(self) -> None:
        """Tell all engines how many they are."""
        for channel in self._channels:
            with suppress(PeerLost):
                channel.send(EnginesConnected(engines=len(self._channels)))


class Watch:
    """Releases a session's GPU when its engine is gone, or when it waits for the same message at two looks."""

    def __init__(self, connection: socket.socket, patience: float) -> None:
        """`patience`: seconds from one look to the next."""
        self._connection, self._patience = connection, patience
        self._end: ServerEnd | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-watch", daemon=True)
        self._thread.start()

    def look_at(self, end: ServerEnd) -> None:
        """Watch this end of a mailbox from now on."""
        self._end = end

    def close(self) -> None:
        """End the watch. No more is received over the connection."""
        self._closed.set()
        with suppress(OSError):  # the engine has closed it
            self._connection.shutdown(socket.SHUT_RD)
        self._thread.join()

    def _run(self) -> None:
        closed, before = select.poll(), None
        closed.register(self._connection, select.POLLRDHUP)
        while not closed.poll(1000 * self._patience):
            now = None if self._end is None else self._end.waiting
            if now is not None and now == before:
                break
            before = now
        while not self._closed.is_set():
            if self._end is not None:
                self._end.give_up()
            self._closed.wait(AGAIN)
