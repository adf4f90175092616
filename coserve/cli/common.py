"""Options and helpers, such as the client, that several commands share."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import typer

from coserve.cli.job_table import columns
from coserve.client import Client, RetryPolicy, asynchronous
from coserve.core.errors import CoserveError, EngineUnavailable
from coserve.core.health import starting_line
from coserve.core.hints import value_hint
from coserve.core.limits import PAGE_LIMIT
from coserve.core.training.settings import Optimizer

DEFAULT_URL = asynchronous.DEFAULT_URL
Url = Annotated[str, typer.Option("--url", envvar="COSERVE_URL", help="where the daemon listens")]
Key = Annotated[str | None, typer.Option("--key", envvar="COSERVE_API_KEY", help="API key")]
Wait = Annotated[bool, typer.Option("--wait", help="wait until the daemon is ready")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, one object a line")]
CONNECTION = (
    inspect.Parameter("url", inspect.Parameter.KEYWORD_ONLY, default=DEFAULT_URL, annotation=Url),
    inspect.Parameter("key", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Key),
)
"""The options of a command that calls the daemon."""
Limit = Annotated[int, typer.Option(help="most to list", min=1, max=PAGE_LIMIT)]

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of each unit of a duration."""
RETRY = RetryPolicy(attempts=3, first=0.2)
"""Retry policy for interactive use: a missing daemon is reported within a second."""
retry = ContextVar("retry", default=RETRY)
"""Retry policy of the command that runs."""


def connect(url: str, key: str | None) -> Client:
    """Return a client of the daemon that --url and --key name."""
    return Client(url, api_key=key or None, retry=retry_policy())


def retry_policy() -> RetryPolicy:
    """Return the command's retry policy, which says once on standard error why it waits for a quota or a queue."""
    said = list[CoserveError]()

    def say(error: CoserveError, seconds: float) -> None:
        if error.status == 429 and not said:
            said.append(error)
            print(f"{error}; trying again in {math.ceil(seconds)} s", file=sys.stderr, flush=True)

    return replace(retry.get(), on_wait=say)


def seconds(text: str) -> float:
    """Return a duration in seconds, as a parser of options: `90d`, `12h`, `30m`, `5s`, or seconds without a unit."""
    if (found := re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd]?)", text, re.ASCII)) is None:
        raise typer.BadParameter(f"expected a number and s, m, h or d, such as 90d, got {text!r}")
    return float(found[1]) * UNITS[found[2]]


def say_more(command: str, limit: int, last: str) -> None:
    """Print on standard error how to list the entries after `last`."""
    print(f"there are more: coserve {command} --limit {limit} --after {last}", file=sys.stderr)


def json_text(value: object, terminal: bool = False) -> str:
    """Return JSON on one line, or indented if it goes to a terminal."""
    line = msgspec.json.encode(value)
    return (msgspec.json.format(line, indent=2) if terminal else line).decode()


def print_json(value: object) -> None:
    print(json_text(value))


def print_list(items: Sequence[object], as_json: bool, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print each item as a line of JSON, or their rows in columns below `headers`."""
    if as_json:
        for item in items:
            print_json(item)
    else:
        print("\n".join(columns([headers, *rows])))


def say_if_starting(client: Client) -> None:
    """Print on standard error that the daemon's engine is starting, if it is."""
    with contextlib.suppress(CoserveError):  # the command's own output has already been shown
        health = client.health()
        if health.status == "starting":
            print(starting_line(health.warming), file=sys.stderr)


@contextlib.contextmanager
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


def target_names(text: str) -> tuple[str, ...]:
    """Return the comma-separated names in one value of `--targets`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def optimizer_named(text: str) -> Optimizer:
    """Return the value of `--optimizer`. For another library's name the error suggests ours."""
    try:
        return Optimizer(text)
    except ValueError:
        expected = f"expected one of {', '.join(Optimizer)}, got {text!r}"
        raise typer.BadParameter(expected + value_hint("optimizer", text)) from None


def field_option(name: str, kind: Any, default: object, text: str) -> inspect.Parameter:  # noqa: ANN401 - any type
    """Return an option of a request's field, for `with_options`. `text`: the field's docstring."""
    shown = typer.Option(default, help=text)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=kind | None)


def with_options(command: Callable[..., None], options: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Return the command with these options. It gets their values by name as its parameter `options`."""
    own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "options"]
    added = list(options)

    def run(**given: Any) -> None:  # noqa: ANN401 - what typer has read
        values = {option.name: given.pop(option.name) for option in added}
        command(options={name: value for name, value in values.items() if value not in (None, [])}, **given)

    _set_parameters(run, [*own, *added], command)
    return run


def client_command(group: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command of the group, with the options --url and --key. It gets the daemon's client as its
    parameter `client`."""

    def register(command: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "client"]

        def run(url: str, key: str | None, **given: Any) -> None:  # noqa: ANN401 - what typer has read
            with connect(url, key) as client:
                command(client=client, **given)

        _set_parameters(run, [*own, *CONNECTION], command)
        group.command(name)(run)
        return command

    return register


def _set_parameters(
    run: Callable[..., None], parameters: Iterable[inspect.Parameter], command: Callable[..., None]
) -> None:
    """Give `run` the parameters that typer reads, and the command's help."""
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in named}
    run.__doc__ = command.__doc__
