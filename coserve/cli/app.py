"""The table of commands, and what becomes of an error."""

from __future__ import annotations

import sys

import typer

from coserve.cli.adapters import adapters_app
from coserve.cli.bench import bench
from coserve.cli.demo import demo
from coserve.cli.failures import run_safely
from coserve.cli.generate import generate
from coserve.cli.jobs import finetune, jobs_app
from coserve.cli.serve import serve
from coserve.cli.settings import show_config

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Fine-tune and serve many LoRA adapters.")
app.add_typer(jobs_app, name="jobs")
app.add_typer(adapters_app, name="adapters")
app.command("serve")(serve)
app.command("generate")(generate)
app.command("finetune")(finetune)
app.command("bench")(bench)
app.command("demo")(demo)
app.command("config")(show_config)


def main() -> None:
    """The console script. Whatever goes wrong ends with one line, not with a traceback."""
    sys.exit(run_safely(lambda: app(standalone_mode=True)))
