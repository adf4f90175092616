"""The commands `coserve backup` and `coserve restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coserve.cli.common import AsJson, print_json
from coserve.state import backup as copies
from coserve.state.backup import Backup

DataDir = Annotated[Path, typer.Option("--data-dir", envvar="COSERVE_DATA_DIR", help="the daemon's data folder")]
DEFAULT = Path("coserve-data")


def backup(
    target: Annotated[Path, typer.Argument(help="a new or empty folder")],
    data_dir: DataDir = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Copy the data folder of a daemon, which may run: registry, adapters, files, batches, and unfinished jobs with
    their checkpoints."""
    _show(copies.back_up(data_dir, target), as_json)


def restore(
    source: Annotated[Path, typer.Argument(help="a folder that coserve backup made")],
    data_dir: DataDir = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Restore a backup into a data folder, which must be new or empty. Jobs go on from its checkpoints."""
    _show(copies.restore(source, data_dir), as_json)


def _show(made: Backup, as_json: bool) -> None:
    if as_json:
        print_json(made)
    else:
        size = f"{made.bytes / (1 << 20):.1f} MiB"
        print(f"{made.adapters} adapter versions, {made.jobs} unfinished jobs, {made.files} files, {size}")
