"""The command `coserve lora-server`: LoRA servers that several daemons use."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from coserve.cli.daemon.lora_servers import keep_servers
from coserve.core.link.lora_servers import ListenerSettings
from coserve.core.logs.setup import LogSettings, set_up_logging


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
