"""The commands `coserve keys`, `coserve quotas` and `coserve log-level`: calls of the routes under `/admin`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
import typer
from msgspec import to_builtins

from coserve.cli.app import command_group
from coserve.cli.common import DEFAULT_URL, AsJson, Key, Url, json_text, print_json, print_list, retry_policy, seconds
from coserve.cli.job_table import age, columns
from coserve.client.caller import Caller
from coserve.client.transport import HttpTransport
from coserve.core.access.principal import DEFAULT_PROJECT, Scope
from coserve.core.access.schemas import ApiKey, CreateKey, KeyList, LogLevel, NewKey, Quota, QuotaList, QuotaUse

T = TypeVar("T")


def call(url: str, key: str | None, method: str, path: str, type: type[T], body: msgspec.Struct | None = None) -> T:
    """Send one request and decode its answer. Raises the daemon's error, or `Unreachable`."""

    async def send() -> T:
        transport = HttpTransport(url, read_timeout=60.0)
        caller = Caller(transport, api_key=key or None, retry=retry_policy())
        try:
            return await caller.call(method, f"/admin/{path}", type, body=body)
        finally:
            await transport.close()

    return asyncio.run(send())


keys_app = command_group("Create, list and revoke API keys of projects.")
KEY_HEADERS = ("ID", "PROJECT", "SCOPES", "STATE", "AGE", "NAME")


@keys_app.command("create")
def create_key(
    scope: Annotated[list[Scope], typer.Option(help="what the key allows; may be repeated")],
    project: Annotated[str, typer.Option(help="whose files, jobs and adapters it sees")] = DEFAULT_PROJECT,
    name: Annotated[str, typer.Option(help="what it is for")] = "",
    expires: Annotated[
        float | None,
        typer.Option(parser=seconds, metavar="TIME", help="time until it expires: 90d, 12h, 30m; default: never"),
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Create an API key and print it. It is shown this once; the daemon keeps its hash only."""
    wanted = CreateKey(scopes=scope, project=project, name=name, expires_in=expires)
    made = call(url, key, "POST", "keys", NewKey, wanted)
    print(json_text(made) if as_json else made.secret)


@keys_app.command("list")
def list_keys(as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """List API keys, without their secrets."""
    keys, now = call(url, key, "GET", "keys", KeyList).data, time.time()
    rows = [
        (each.id, each.project, ",".join(each.scopes), _state(each, now), age(now - each.created_at), each.name)
        for each in keys
    ]
    print_list(keys, as_json, KEY_HEADERS, rows)


@keys_app.command("revoke")
def revoke_key(id: str, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Revoke an API key at once; its requests in progress are cut off."""
    revoked = call(url, key, "DELETE", f"keys/{id}", ApiKey)
    print(f"revoked {revoked.id} of project {revoked.project}")


def _state(key: ApiKey, now: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is None:
        return "valid"
    return "expired" if key.expires_at <= now else f"valid for {age(key.expires_at - now)}"


quotas_app = command_group("Show and set the quotas of projects.")
QUOTA_FIELDS = tuple(field.name for field in msgspec.structs.fields(Quota))


@quotas_app.command("list")
def list_quotas(as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """List the quotas of projects that have one, and what they use."""
    found = call(url, key, "GET", "quotas", QuotaList)
    _show({project: quota for project, quota in found.data.items() if quota != Quota()}, as_json, found.used)


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


def _show(quotas: Mapping[str, Quota], as_json: bool, used: Mapping[str, QuotaUse] | None = None) -> None:
    used = used or {}
    if as_json:
        print_json({p: to_builtins(q) | ({"used": used[p]} if p in used else {}) for p, q in quotas.items()})
        return
    rows = [
        (project, *(_limit(getattr(quota, name), getattr(used.get(project), name, None)) for name in QUOTA_FIELDS))
        for project, quota in sorted(quotas.items())
    ]
    print("\n".join(columns([("PROJECT", *(name.upper() for name in QUOTA_FIELDS)), *rows])))


def _limit(limit: int | None, used: int | None) -> str:
    if limit is None:
        return "-" if used is None else str(used)
    return str(limit) if used is None else f"{used} of {limit}"


def set_log_level(
    level: Annotated[Literal["debug", "info", "warning", "error"], typer.Argument(help="least level that is logged")],
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Change the log level of a running daemon, until it ends."""
    print(call(url, key, "PUT", "log-level", LogLevel, LogLevel(level=level)).level)
