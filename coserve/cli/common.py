"""Options and the client that several commands share."""

from __future__ import annotations

import contextlib
import sys
from contextvars import ContextVar
from typing import Annotated

import msgspec
import typer

from coserve.client import Client, RetryPolicy
from coserve.client.asynchronous import DEFAULT_URL
from coserve.core.errors import CoserveError
from coserve.core.health import starting_line
from coserve.core.hints import value_hint
from coserve.core.limits import PAGE_LIMIT
from coserve.core.types import Optimizer

__all__ = [
    "DEFAULT_URL",
    "RETRY",
    "AsJson",
    "Key",
    "Limit",
    "Url",
    "connect",
    "json_text",
    "optimizer_named",
    "say_if_starting",
    "say_more",
    "target_names",
]

Url = Annotated[str, typer.Option("--url", envvar="COSERVE_URL", help="where the daemon listens")]
Key = Annotated[str | None, typer.Option("--key", envvar="COSERVE_API_KEY", help="API key")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, one object a line")]
Limit = Annotated[int, typer.Option(help="most to list", min=1, max=PAGE_LIMIT)]

RETRY = RetryPolicy(attempts=3, first=0.2)
"""For interactive use: a missing daemon is reported within a second."""
retry = ContextVar("retry", default=RETRY)
"""Of the command that runs."""


def connect(url: str, key: str | None) -> Client:
    """The daemon that --url and --key name."""
    return Client(url, api_key=key or None, retry=retry.get())


def say_more(command: str, limit: int, last: str) -> None:
    """Print how to list the entries after `last`, on standard error."""
    print(f"there are more: coserve {command} --limit {limit} --after {last}", file=sys.stderr)


def json_text(value: object, terminal: bool) -> str:
    """One line of JSON, or indented lines for who reads them on a terminal."""
    line = msgspec.json.encode(value)
    return (msgspec.json.format(line, indent=2) if terminal else line).decode()


def say_if_starting(client: Client) -> None:
    """Print that the daemon's engine starts, on standard error, if it does."""
    with contextlib.suppress(CoserveError):  # what was asked for has been shown
        health = client.health()
        if health.status == "starting":
            print(starting_line(health.warming), file=sys.stderr)


def target_names(text: str) -> tuple[str, ...]:
    """The names in one value of `--targets`, which commas separate."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def optimizer_named(text: str) -> Optimizer:
    """The value of `--optimizer`. For another library's name the error says ours."""
    try:
        return Optimizer(text)
    except ValueError:
        expected = f"expected one of {', '.join(Optimizer)}, got {text!r}"
        raise typer.BadParameter(expected + value_hint("optimizer", text)) from None
