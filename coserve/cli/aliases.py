"""The commands `coserve aliases`."""

from __future__ import annotations

from typing import Annotated

import typer

from coserve.cli.app import PLAIN, CommandGroup
from coserve.cli.common import DEFAULT_URL, AsJson, Key, Url, connect, json_text
from coserve.cli.job_table import columns
from coserve.core.schemas import Alias

aliases_app = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode=PLAIN,
    help="Let names mean versions of adapters: move, split, promote and roll back.",
)


@aliases_app.command("list")
def list_aliases(as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """List aliases."""
    with connect(url, key) as client:
        found = client.aliases()
    if as_json:
        for alias in found:
            _show(alias, True)
        return
    rows = [(each.name, each.target, _canary(each), each.previous or "") for each in found]
    print("\n".join(columns([("ALIAS", "TARGET", "CANARY", "BEFORE"), *rows])))


@aliases_app.command("set")
def set_alias(
    name: str,
    target: str,
    canary: Annotated[str | None, typer.Option(help="another version, which gets --weight of the requests")] = None,
    weight: Annotated[float, typer.Option(help="share of the requests for --canary, 0 to 1", min=0, max=1)] = 0.0,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Create alias NAME for TARGET, or move it: a version (NAME@VERSION), or the current one of an adapter's name."""
    with connect(url, key) as client:
        _show(client.set_alias(name, target, canary=canary, weight=weight), as_json)


@aliases_app.command("promote")
def promote_alias(name: str, as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Give all requests of NAME to its canary."""
    with connect(url, key) as client:
        _show(client.promote_alias(name), as_json)


@aliases_app.command("rollback")
def roll_back_alias(name: str, as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Remove NAME's canary; if it has none, return to its previous version."""
    with connect(url, key) as client:
        _show(client.rollback_alias(name), as_json)


@aliases_app.command("delete")
def delete_alias(name: str, as_json: AsJson = False, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Delete an alias; the adapter stays."""
    with connect(url, key) as client:
        deleted = client.delete_alias(name)
    print(json_text(deleted, False) if as_json else f"deleted {deleted.name}, which meant {deleted.target}")


def _show(alias: Alias, as_json: bool) -> None:
    canary = "" if alias.canary is None else f", {_canary(alias)}"
    print(json_text(alias, False) if as_json else f"{alias.name} means {alias.target}{canary}")


def _canary(alias: Alias) -> str:
    return "" if alias.canary is None else f"{alias.weight:.3g} of requests {alias.canary}"
