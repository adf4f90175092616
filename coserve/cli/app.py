"""The commands, and the entry point that handles their errors."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from coserve import __version__
from coserve.cli.adapters import adapters_app
from coserve.cli.bench.command import BenchCommand, bench
from coserve.cli.demo import demo
from coserve.cli.failures import run_safely
from coserve.cli.generate import generate
from coserve.cli.gpu.memory import memory
from coserve.cli.gpu.profile import profile
from coserve.cli.jobs import finetune, jobs_app
from coserve.cli.serve import serve
from coserve.cli.settings import show_config
from coserve.cli.settings_help import SettingsCommand
from coserve.cli.warm import warm


def _version(wanted: bool) -> None:
    if wanted:
        print(f"coserve {__version__}")
        raise typer.Exit


def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Fine-tune and serve many LoRA adapters."""


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune and serve many LoRA adapters.",
)
app.callback()(_top)
app.add_typer(jobs_app, name="jobs")
app.add_typer(adapters_app, name="adapters")
app.command("serve", cls=SettingsCommand)(serve)
app.command("warm", cls=SettingsCommand)(warm)
app.command("generate")(generate)
app.command("finetune")(finetune)
app.command("bench", cls=BenchCommand)(bench)
app.command("profile")(profile)
app.command("memory")(memory)
app.command("demo")(demo)
app.command("config")(show_config)


def run(arguments: list[str] | None = None) -> int:
    """The exit status of a command line, the process's own by default. Every error ends with one line, no traceback."""
    return run_safely(lambda: app(arguments, prog_name="coserve", standalone_mode=False))


def main() -> None:
    """The console script."""
    sys.exit(run())
