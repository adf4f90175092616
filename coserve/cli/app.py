"""The CLI's entry point, which also handles the commands' errors.

A command's module is imported only when the command runs (all of them for help), since every import delays the start of
the engine in `coserve serve`.
"""

from __future__ import annotations

import sys
from contextvars import copy_context
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from coserve import __version__
from coserve.cli.failures import USAGE, run_safely

if TYPE_CHECKING:
    from coserve.client import RetryPolicy

COMMANDS = {
    "serve": ("serve", "serve", "settings_options", "SettingsCommand"),
    "warm": ("warm", "warm", "settings_options", "SettingsCommand"),
    "generate": ("generation.generate", "generate"),
    "chat": ("generation.generate", "chat"),
    "finetune": ("finetuning.command", "finetune"),
    "learn": ("finetuning.learn", "learn"),
    "eval": ("generation.evaluation", "evaluate"),
    "bench": ("bench.command", "bench", "bench.command", "BenchCommand"),
    "memory": ("node.memory", "memory"),
    "doctor": ("node.doctor", "doctor"),
    "plan": ("node.plan", "plan"),
    "lora-server": ("node.lora_server", "run_lora_servers"),
    "demo": ("demo", "demo"),
    "config": ("settings", "show_config"),
    "jobs": ("jobs", "jobs_app"),
    "adapters": ("adapters", "adapters_app"),
    "keys": ("admin", "keys_app"),
    "quotas": ("admin", "quotas_app"),
    "log-level": ("admin", "set_log_level"),
    "ps": ("node.running", "list_daemons"),
    "stop": ("node.running", "stop"),
    "backup": ("node.backup", "backup"),
    "restore": ("node.backup", "restore"),
    "aliases": ("aliases", "aliases_app"),
}
"""For each command its module and its function or group, then module and name of its command class if it has one."""
PLAIN = None
"""typer's `rich_markup_mode`: help is plain text, so that `coserve[bitsandbytes]` is not parsed as markup."""


class CommandGroup(TyperGroup):
    """Prints its help if no command is given. The help has the whole first sentence of each command's own help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's own types, wherever typer keeps them
        if not args:
            print(ctx.get_help())
            ctx.exit(USAGE)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(each.help or "")) for name, each in found if each is not None])


def _first_sentence(text: str) -> str:
    sentence, dot, _ = " ".join(text.split()).partition(". ")
    return sentence + dot.rstrip()


def command_group(help: str) -> typer.Typer:
    """Return an empty group of commands."""
    return typer.Typer(cls=CommandGroup, rich_markup_mode=PLAIN, help=help)


class _Commands(CommandGroup):
    """Imports a command when it is asked for."""

    def __init__(self, **given: Any) -> None:  # noqa: ANN401
        super().__init__(**given)
        unmade: Any = None
        self.commands = dict.fromkeys(COMMANDS, unmade)

    def get_command(self, ctx: object, cmd_name: str) -> Any:  # noqa: ANN401 - a class of typer's own
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _make(cmd_name, *COMMANDS[cmd_name])
        return self.commands.get(cmd_name)

    def list_commands(self, ctx: object) -> list[str]:
        return list(COMMANDS)


def _make(name: str, module: str, attribute: str, *kind: str) -> Any:  # noqa: ANN401
    found = _of(module, attribute)
    if isinstance(found, typer.Typer):
        group = get_group(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, rich_markup_mode=PLAIN)
    alone.command(name, cls=_of(*kind) if kind else None)(found)
    return get_command(alone)


def _of(module: str, attribute: str) -> Any:  # noqa: ANN401
    return getattr(import_module(f"coserve.cli.{module}"), attribute)


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
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=PLAIN,
    context_settings={"max_content_width": 100},
    help="Fine-tune and serve many LoRA adapters.",
)
app.callback()(_top)


def run(arguments: list[str] | None = None, *, retry: RetryPolicy | None = None) -> int:
    """Run a command line (default: the process's own) and return the exit status. Every error ends with one line, no
    traceback. `retry`: retry policy for a daemon that does not answer (`RetryPolicy`); None: `common.RETRY`."""

    def command() -> object:
        if retry is not None:
            from coserve.cli import common  # it imports the client, which not every command needs

            common.retry.set(retry)
        return app(arguments, prog_name="coserve", standalone_mode=False)

    return copy_context().run(run_safely, command)


def main() -> None:
    """Run the console script."""
    sys.exit(run())
