"""The commands `coserve adapters`."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from coserve.cli import common, distillation, merging
from coserve.cli.app import command_group
from coserve.cli.failures import FAILED, usage_errors
from coserve.cli.job_table import age
from coserve.cli.jobs import follow_job
from coserve.client import Client
from coserve.core.errors import CoserveError
from coserve.core.limits import PAGE_SIZE
from coserve.core.schemas.adapters import Adapter, ConvertedAdapter
from coserve.lora.files.wrapped import check_decoder, rename_decoder

adapters_app = command_group("List, import, download, read ahead, roll back, convert and delete adapters.")
HEADERS = ("ADAPTER", "RANK", "SIZE", "AGE", "SOURCE", "NEWER", "ALIASES", "TAGS", "KEPT")


@common.client_command(adapters_app, "list")
def list_adapters(
    client: Client,
    limit: common.Limit = PAGE_SIZE,
    after: Annotated[str | None, typer.Option(help="list those whose names come after this one")] = None,
    search: Annotated[str | None, typer.Option(help="list those whose names contain this, in any case")] = None,
    source: Annotated[str | None, typer.Option(help="list those made by job, import, load or convert")] = None,
    tag: Annotated[str | None, typer.Option(help="list those with this tag")] = None,
    base: Annotated[str | None, typer.Option(help="list those of the base with this name")] = None,
    resident: Annotated[
        bool | None, typer.Option("--resident/--not-resident", help="list those in memory, or only on disk")
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """List adapters with their current versions, and the newest one if a rollback has left a newer one behind."""
    filters = {"search": search, "source": source, "tag": tag, "base": base}
    page = client.adapters(after=after, limit=limit, resident=resident, **filters)
    common.say_if_starting(client)
    common.print_list(page.data, as_json, HEADERS, [_cells(adapter, time.time()) for adapter in page.data])
    if page.has_more:
        given = [f" --{name} {shlex.quote(value)}" for name, value in filters.items() if value is not None]
        given += [] if resident is None else [" --resident" if resident else " --not-resident"]
        common.say_more(f"adapters list{''.join(given)}", limit, page.data[-1].id)


@common.client_command(adapters_app, "show")
def show_adapter(client: Client, name: str, as_json: common.AsJson = False) -> None:
    """Show an adapter as JSON, on a terminal indented unless --json is given."""
    print(common.json_text(client.adapter(name), sys.stdout.isatty() and not as_json))


@common.client_command(adapters_app, "import")
def import_adapter(client: Client, name: str, source: str, as_json: common.AsJson = False) -> None:
    """Upload PEFT files as the next version of NAME: a folder, an archive (.tar, .tar.gz, .zip), or a URL of either,
    which is fetched here (s3://BUCKET/PATH, hf://OWNER/NAME)."""
    _show_adapter(client.import_adapter(name, source), as_json)


@common.client_command(adapters_app, "download")
def download_adapter(
    client: Client,
    name: str,
    folder: Path,
    decoder: Annotated[
        str | None,
        typer.Option(
            help="name modules as in a model that has its decoder there: model, or model.language_model for a "
            "multimodal one"
        ),
    ] = None,
) -> None:
    """Save an adapter's PEFT files into a new folder."""
    if decoder is not None:
        with usage_errors():
            check_decoder(decoder)
    saved = client.download_adapter(name, folder)
    if decoder is not None:
        rename_decoder(saved, decoder)
    print(saved)


@common.client_command(adapters_app, "merge")
def merge_adapter(
    client: Client,
    name: str,
    folder: Path,
    base: Annotated[str, typer.Option(help="the base: a folder, a GGUF file, a hub name, 'bundled' or 'smollm2'")],
    trust_remote_code: Annotated[bool, typer.Option(help="run Python code that comes with the base's files")] = False,
) -> None:
    """Save the base with an adapter merged into its weights as a new model folder, for programs that know no adapters.
    Needs PEFT (pip install peft) and the host memory of the whole base."""
    merging.merge_adapter(client, name, base, folder, trust_remote_code=trust_remote_code)
    print(folder)


@common.client_command(adapters_app, "delete")
def delete_adapter(
    client: Client,
    name: str,
    yes: Annotated[bool, typer.Option("--yes", help="delete all versions without asking")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Delete one version of an adapter (NAME@VERSION), or all of them (NAME), after a question unless --yes is
    given."""
    if "@" not in name and not yes:
        _confirm(client.adapter(name))
    gone = client.delete_adapter(name)
    if as_json:
        common.print_json(gone)
        return
    print(f"deleted {', '.join(f'{gone.id}@{version}' for version in gone.versions)}")
    if gone.current_ref is not None:
        print(f"{gone.id} now means {gone.current_ref}")


def asks() -> bool:
    """Return whether a user is present to answer a question."""
    return sys.stdin.isatty()


def _confirm(adapter: Adapter) -> None:
    """Ask before all versions are deleted. Raises `typer.BadParameter` if no user can answer, `typer.Exit` if the
    answer is no."""
    versions = adapter.versions or [adapter.version]
    what = f"{adapter.ref}, its only version" if len(versions) == 1 else f"all {len(versions)} versions of {adapter.id}"
    if not asks():
        raise typer.BadParameter(f"expected --yes to delete {what}, or NAME@VERSION for one of them")
    if not typer.confirm(f"delete {what}?", err=True):
        raise typer.Exit(FAILED)


@common.client_command(adapters_app, "set")
def update_adapter(
    client: Client,
    name: str,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", help="instead of the tags of NAME; may be repeated")
    ] = None,
    clear_tags: Annotated[bool, typer.Option("--clear-tags", help="take all tags off NAME")] = False,
    ttl: Annotated[
        float | None,
        typer.Option(parser=common.seconds, metavar="TIME", help="time until NAME is deleted: 90d, 12h, 30m; 0: never"),
    ] = None,
    pinned: Annotated[
        bool | None, typer.Option("--pin/--unpin", help="keep this version in host memory, or no longer")
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Set the tags and the time to live of an adapter, and whether a version of it stays in host memory."""
    if clear_tags and tags:
        raise typer.BadParameter("expected --tag, or --clear-tags, got both")
    given = [] if clear_tags else tags or None
    if given is None and ttl is None and pinned is None:
        raise typer.BadParameter("expected --tag, --clear-tags, --ttl, --pin or --unpin")
    _show_adapter(client.update_adapter(name, tags=given, ttl=ttl, pinned=pinned), as_json)


@common.client_command(adapters_app, "prefetch")
def prefetch_adapter(client: Client, name: str, as_json: common.AsJson = False) -> None:
    """Have an adapter read into host memory before its first request."""
    _show_adapter(client.prefetch_adapter(name), as_json)


@common.client_command(adapters_app, "rollback")
def roll_back_adapter(client: Client, name: str, version: int, as_json: common.AsJson = False) -> None:
    """Make an older VERSION the current one of NAME, until a newer one is published."""
    _show_adapter(client.rollback_adapter(name, version), as_json)


@common.client_command(adapters_app, "convert")
def convert_adapter(
    client: Client,
    name: str,
    bd_blocks: Annotated[int, typer.Option(help="diagonal blocks of the new adapter; 1: plain LoRA", min=1)],
    rank: Annotated[
        int | None, typer.Option(help="of all blocks together", show_default="the smallest one within --max-error")
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="most of the update's norm that may be lost, 0 to 1", show_default="0.05, or no bound for --rank"
        ),
    ] = None,
    new_name: Annotated[
        str | None, typer.Option("--name", help="of the new adapter", show_default="NAME-bdN; NAME-lora for one block")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            "--distill",
            help="then train it toward NAME's outputs: a JSONL file of rows, or 'generations', which the base makes",
        ),
    ] = None,
    max_output_error: Annotated[
        float | None,
        typer.Option(
            help="double the rank until distillation leaves at most this divergence from NAME, in nats a token", min=0
        ),
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Make a BD-LoRA adapter of a LoRA one (or the reverse), by truncated SVD of each shard."""
    if max_output_error is not None and (rows is None or max_error is not None):
        raise typer.BadParameter("--max-output-error needs --distill, and no --max-error")
    data = None if rows is None else distillation.read_rows(client, rows)
    if max_output_error is not None and rank is None:
        rank = -(-client.adapter(name).rank // bd_blocks) * bd_blocks
    missed: list[str] = []
    while True:
        done = client.convert_adapter(name, bd_blocks, rank=rank, max_error=max_error, name=new_name)
        _show_conversion(done, as_json)
        if data is None:
            break
        if done.error < distillation.LOSSLESS:
            typer.echo(f"nothing was lost: not distilled, {rows} is not used", err=True)
            break
        try:
            started = distillation.start_distillation(client, done, data)
        except CoserveError:  # mostly untrainable rows: delete the adapter that was converted for them
            client.delete_adapter(done.adapter.ref)
            raise
        job = follow_job(started, as_json)
        if not as_json:
            print("\n".join(distillation.result_lines(job)))
        _, after = distillation.output_errors(job)
        if max_output_error is None or after <= max_output_error:
            break
        missed += [done.adapter.ref, f"{job.adapter}@{job.version}"]
        rank = 2 * done.rank
    deleted = distillation.delete_unused(client, missed)
    if deleted and not as_json:
        print(f"deleted {', '.join(deleted)}: beyond --max-output-error")


def _show_conversion(done: ConvertedAdapter, as_json: bool) -> None:
    if as_json:
        common.print_json(done)
        return
    _show_adapter(done.adapter, False)
    print(f"error {done.error:.3g}; within {done.max_error:g} from rank {done.smallest_rank} on")
    print("rank " + "".join(f"{rank:>8}" for rank in done.errors))
    print("error" + "".join(f"{error:>8.3f}" for error in done.errors.values()))


def _show_adapter(adapter: Adapter, as_json: bool) -> None:
    if as_json:
        common.print_json(adapter)
        return
    lists = {"tags": adapter.tags, "aliases": adapter.aliases}
    marks = [f"{name} {', '.join(values)}" for name, values in lists.items() if values]
    marks += _kept(adapter, time.time())
    rank = f"cartridge of {_rank(adapter)}" if adapter.cartridge else f"rank {_rank(adapter)}"
    print("  ".join((adapter.ref, rank, _size(adapter), adapter.source, *marks)))


def _kept(adapter: Adapter, now: float) -> list[str]:
    """How long the adapter stays: in host memory, and at all."""
    marks = ["pinned"] if adapter.pinned else []
    if adapter.expires_at is not None:
        marks.append(f"deleted in {age(adapter.expires_at - now)}")
    return marks


def _cells(adapter: Adapter, now: float) -> tuple[str, ...]:
    newer = "" if adapter.newest in (None, adapter.version) else f"{adapter.id}@{adapter.newest}"
    of_name = newer, ", ".join(adapter.aliases), ", ".join(adapter.tags), ", ".join(_kept(adapter, now))
    return adapter.ref, _rank(adapter), _size(adapter), age(now - adapter.created_at), adapter.source, *of_name


def _rank(adapter: Adapter) -> str:
    if adapter.cartridge:
        return f"{adapter.rank} tokens"
    if adapter.prefix_tokens:
        return f"{adapter.rank} + {adapter.prefix_tokens} tokens"
    return f"{adapter.rank} in {adapter.bd_blocks} blocks" if adapter.bd_blocks > 1 else str(adapter.rank)


def _size(adapter: Adapter) -> str:
    return f"{adapter.bytes / 2**20:.1f} MiB" if adapter.bytes >= 1 << 20 else f"{adapter.bytes / 2**10:.0f} KiB"
