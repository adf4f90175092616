"""The commands `coserve keys`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from coserve.cli.access.call import call
from coserve.cli.app import command_group
from coserve.cli.common import DEFAULT_URL, AsJson, Key, Url, json_text, print_list, seconds
from coserve.cli.job_table import age
from coserve.core.access.principal import DEFAULT_PROJECT, Scope
from coserve.core.access.schemas import ApiKey, CreateKey, KeyList, NewKey

keys_app = command_group("Create, list and revoke API keys of projects.")
HEADERS = ("ID", "PROJECT", "SCOPES", "STATE", "AGE", "NAME")


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
    print_list(keys, as_json, HEADERS, rows)


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
