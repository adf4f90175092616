"""Options that `coserve generate` and `coserve chat` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, get_args

import typer

from coserve.cli.common import connect, say_if_starting
from coserve.client import Client, GenerateOptions
from coserve.core.errors import EngineUnavailable
from coserve.core.types import SloClass

CLASSES: dict[str, SloClass] = {name: name for name in get_args(SloClass)}

AdapterName = Annotated[str | None, typer.Option(help="NAME or NAME@VERSION", show_default="the base")]
MaxTokens = Annotated[int, typer.Option(help="most tokens to generate")]
Temperature = Annotated[float, typer.Option(help="0: always the likeliest token")]
TopP = Annotated[float | None, typer.Option(help="choose among the likeliest tokens of this total probability")]
TopK = Annotated[int | None, typer.Option(help="choose among so many of the likeliest tokens; 0: all")]
Stop = Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")]
Seed = Annotated[int | None, typer.Option(help="the same seed gives the same text")]
SloClassName = Annotated[
    str | None, typer.Option(help="latency targets and order: interactive or batch", show_default="interactive")
]
Wait = Annotated[bool, typer.Option("--wait", help="wait until the daemon is ready")]


def generate_options(
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    stop: list[str] | None,
    seed: int | None,
    slo_class: str | None,
) -> GenerateOptions:
    """Return the given options for the client. Raises `typer.BadParameter` for an unknown class."""
    options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature}
    if top_p is not None:
        options["top_p"] = top_p
    if top_k is not None:
        options["top_k"] = top_k
    if stop:
        options["stop"] = stop
    if seed is not None:
        options["seed"] = seed
    if slo_class is not None:
        if slo_class not in CLASSES:
            raise typer.BadParameter(f"--slo-class: expected {' or '.join(CLASSES)}, got {slo_class!r}")
        options["slo_class"] = CLASSES[slo_class]
    return options


@contextmanager
def connected(url: str, key: str | None, wait: bool) -> Iterator[Client]:
    """Yield a client of the daemon. `wait`: wait until it is ready; otherwise the error of a starting daemon names
    --wait."""
    with connect(url, key) as client:
        if wait:
            say_if_starting(client)
            client.wait_ready(timeout=None)
        try:
            yield client
        except EngineUnavailable as error:
            raise EngineUnavailable(f"{error}; --wait waits for it") from error
