"""The commands `coserve quotas` and `coserve log-level`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import typer

from coserve.cli.access.call import call
from coserve.cli.app import command_group
from coserve.cli.common import DEFAULT_URL, AsJson, Key, Url, print_json
from coserve.cli.job_table import columns
from coserve.core.access.schemas import LogLevel, Quota, QuotaList

quotas_app = command_group("Show and set the quotas of projects.")
FIELDS = tuple(field.name for field in msgspec.structs.fields(Quota))


@quotas_app.command("list")
def list_quotas(as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """List the quotas of projects that have one."""
    found = call(url, key, "GET", "quotas", QuotaList).data
    _show({project: quota for project, quota in found.items() if quota != Quota()}, as_json)


@quotas_app.command("set")
def set_quota(
    project: str,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="POST requests a minute")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="prompt and generated tokens a minute")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="jobs that wait, run or are paused")] = None,
    bytes: Annotated[int | None, typer.Option(min=1, help="bytes of files and adapters")] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Replace a project's quota, at once; what is not given has no limit."""
    quota = Quota(requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, jobs=jobs, bytes=bytes)
    _show({project: call(url, key, "PUT", f"quotas/{project}", Quota, quota)}, as_json)


def _show(quotas: Mapping[str, Quota], as_json: bool) -> None:
    if as_json:
        print_json(quotas)
        return
    rows = [
        (project, *("-" if getattr(quota, name) is None else str(getattr(quota, name)) for name in FIELDS))
        for project, quota in sorted(quotas.items())
    ]
    print("\n".join(columns([("PROJECT", *(name.upper() for name in FIELDS)), *rows])))


def set_log_level(
    level: Annotated[Literal["debug", "info", "warning", "error"], typer.Argument(help="least level that is logged")],
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Change the log level of a running daemon, until it ends."""
    print(call(url, key, "PUT", "log-level", LogLevel, LogLevel(level=level)).level)
