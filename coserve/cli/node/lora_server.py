"""The command `coserve lora-server`: LoRA servers that several daemons use."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from coserve.core.errors import StartupError
from coserve.core.link.lora_servers import REFUSED, ListenerSettings, socket_path
from coserve.core.logs import LogSettings, set_up_logging
from coserve.core.processes import how_ended, start_child

log = logging.getLogger(__name__)

SERVER = "coserve.engine.lora_server.process"
PAUSE = 1.0
"""Seconds before a server that has ended is started again."""
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Hardware queues of a GPU: 8 by default, at most 32. Streams that share one wait for each other, and the stream of an
engine's steps waits for the engine."""
LONGEST_PATH = 100
"""Most bytes of a socket's path (108 with its end on Linux, less on other systems)."""


def run_lora_servers(
    folder: Annotated[Path, typer.Argument(help="where they listen; made, for this user alone, if it does not exist")],
    servers: Annotated[int, typer.Option(help="how many; each has one of the last GPUs", min=1)] = 1,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where they compute")] = "auto",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="least level that is logged")
    ] = "info",
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="a line of text or a JSON object for each record")
    ] = "text",
) -> None:
    """Run LoRA servers that several daemons of this machine use, until Ctrl-C or SIGTERM. Each daemon has `serve
    --lora-server N --lora-server-at FOLDER`. They must see the daemons' GPUs and data folders."""
    logs = LogSettings(log_level, log_format)
    set_up_logging("lora-servers", logs)
    asyncio.run(keep_servers(folder, ListenerSettings(servers=servers, device=device, logs=logs)))


async def keep_servers(folder: Path, settings: ListenerSettings) -> None:
    """Run the servers of a folder until this is cancelled. `settings`: those of server 0. Raises `StartupError` if
    another process has the folder, for a path that no socket may have, or for a device that this machine lacks."""
    with _locked(folder):
        each = (msgspec.structs.replace(settings, index=index) for index in range(settings.servers))
        await asyncio.gather(*[_keep(folder, own) for own in each])


async def _keep(folder: Path, settings: ListenerSettings) -> None:
    """Run one server, and start it again whenever it ends."""
    path, arguments = socket_path(folder, settings.index), msgspec.json.encode(settings).decode()
    while True:
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(str(path))
            process = await start_child(SERVER, end, arguments, environment=CONNECTIONS)
        status = await process.wait()
        if status == REFUSED:
            raise StartupError(f"LoRA server {settings.index} cannot have the device {settings.device}")
        log.warning("LoRA server %d %s; it is started again", settings.index, how_ended(status))
        await asyncio.sleep(PAUSE)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder, for this user alone, and lock it."""
    if len(os.fsencode(socket_path(folder, 9999))) > LONGEST_PATH:
        raise StartupError(f"expected a folder with a shorter path, got {folder}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StartupError(f"cannot use the folder {folder}: {error}") from error
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise StartupError(f"LoRA servers of {folder} are running already") from None
    finally:
        os.close(own)
