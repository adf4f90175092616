"""The commands `coserve aliases`."""

from __future__ import annotations

from typing import Annotated

import typer

from coserve.cli.app import command_group
from coserve.cli.common import AsJson, client_command, json_text, print_list
from coserve.client import Client
from coserve.core.schemas.adapters import Alias

aliases_app = command_group("Let names mean versions of adapters: move, split, promote and roll back.")


@client_command(aliases_app, "list")
def list_aliases(client: Client, as_json: AsJson = False) -> None:
    """List aliases."""
    found = client.aliases()
    rows = [(each.name, each.target, _canary(each), each.previous or "") for each in found]
    print_list(found, as_json, ("ALIAS", "TARGET", "CANARY", "BEFORE"), rows)


@client_command(aliases_app, "set")
def set_alias(
    client: Client,
    name: str,
    target: str,
    canary: Annotated[str | None, typer.Option(help="another version, which gets --weight of the requests")] = None,
    weight: Annotated[float, typer.Option(help="share of the requests for --canary, 0 to 1", min=0, max=1)] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Create alias NAME for TARGET, or move it: a version (NAME@VERSION), or the current one of an adapter's name."""
    _show(client.set_alias(name, target, canary=canary, weight=weight), as_json)


@client_command(aliases_app, "promote")
def promote_alias(client: Client, name: str, as_json: AsJson = False) -> None:
    """Give all requests of NAME to its canary."""
    _show(client.promote_alias(name), as_json)


@client_command(aliases_app, "rollback")
def roll_back_alias(client: Client, name: str, as_json: AsJson = False) -> None:
    """Remove NAME's canary; if it has none, return to its previous version."""
    _show(client.rollback_alias(name), as_json)


@client_command(aliases_app, "delete")
def delete_alias(client: Client, name: str, as_json: AsJson = False) -> None:
    """Delete an alias; the adapter stays."""
    deleted = client.delete_alias(name)
    print(json_text(deleted) if as_json else f"deleted {deleted.name}, which meant {deleted.target}")


def _show(alias: Alias, as_json: bool) -> None:
    canary = "" if alias.canary is None else f", {_canary(alias)}"
    print(json_text(alias) if as_json else f"{alias.name} means {alias.target}{canary}")


def _canary(alias: Alias) -> str:
    return "" if alias.canary is None else f"{alias.weight:.3g} of requests {alias.canary}"
