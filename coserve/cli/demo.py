"""The command `coserve demo`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def demo(
    report: Annotated[Path, typer.Option(help="folder for the report")] = Path("demo-report"),
    base: Annotated[
        str, typer.Option(help="'bundled', or 'smollm2': an adapter learns a task, accuracy before and after")
    ] = "bundled",
) -> None:
    """Show the main features: stream, fine-tune two adapters under load, compare, report."""
    from coserve.cli.demos.learn import learn
    from coserve.cli.demos.run import demo as run
    from coserve.workloads.report.files import check_folder

    check_folder(report)
    asyncio.run(run(report) if base == "bundled" else learn(base, report))
