"""Commands whose options are the settings of a dataclass (`coserve.core.options`), and their help: settings by section,
with types, choices and defaults, in any width."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from coserve.config import Config, sections
from coserve.core.options import item_type, parse_setting, plain_type, setting_path

POSITIONAL = "positional"
_SHORT = {"tp": ("-tp",)}
"""Short options of settings: vLLM's."""
WIDEST = 100
"""Maximum columns of text; longer lines are hard to read."""
_TYPES: dict[object, str] = {str: "TEXT", Path: "PATH", int: "N", float: "NUMBER"}


def settings_command(
    run: Callable[..., None],
    names: Collection[str] | None = None,
    *,
    argument: str | None = None,
    settings: type[Any] = Config,
) -> Callable[..., None]:
    """Return a command with one option per setting of `names` (None: all) and per keyword-only parameter of `run`.

    `run` is called with the settings that were given and its own parameters. `argument`: the one setting that may also
    be given without its option's name.
    """
    hints = get_type_hints(settings)
    own = [p for p in inspect.signature(run, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def command(**given: object) -> None:
        others = {p.name: given.pop(p.name) for p in own}
        positional = given.pop(POSITIONAL, None)
        if argument is not None and positional is not None:
            if given[argument] not in (None, positional):
                raise typer.BadParameter(f"expected one {argument}, got {positional!r} and {given[argument]!r}")
            given[argument] = positional
        found = {name: _value(settings, name, hints[name], value) for name, value in given.items() if value is not None}
        run({name: value for name, value in found.items() if value != ()}, **others)

    parameters = []
    if argument is not None:
        default = typer.Argument(None, metavar=argument.upper(), show_default=False)
        parameters.append(_parameter(POSITIONAL, default, str | None))
    for f in dataclasses.fields(settings):
        if names is None or f.name in names or f.name == argument:
            hint = hints[f.name]
            parameters.append(_parameter(f.name, _option(f.name, hint), _annotation(hint)))
    command.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*parameters, *own]}
    command.__doc__ = run.__doc__
    return command


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:  # noqa: ANN401 - as in `inspect`
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _annotation(hint: Any) -> Any:  # noqa: ANN401 - a type or a union of types
    item = item_type(plain_type(hint))
    return (list[str] if item is str else hint if item is None else str) | None


def _value(settings: type[Any], name: str, hint: object, value: object) -> object:
    """Convert the value that typer read to the setting's type."""
    if isinstance(value, list):
        return tuple(item for text in value for item in cast(tuple[str, ...], parse_setting(settings, name, text)))
    return parse_setting(settings, name, str(value)) if item_type(plain_type(hint)) is not None else value


def _option(name: str, kind: Any) -> Any:  # noqa: ANN401 - a type or a union of types; what typer makes of it
    flag = f"--{name.replace('_', '-')}"
    declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    parser = partial(setting_path, name=name) if Path in (kind, *get_args(kind)) else None
    return typer.Option(None, declared, *_SHORT.get(name, ()), show_default=False, parser=parser)


def option_line(field: dataclasses.Field[Any], hint: Any) -> str:  # noqa: ANN401 - a type or a union of types
    """Return an option with its values, such as `--fairness auto|drr|fcfs`."""
    flag = f"--{field.name.replace('_', '-')}"
    if hint is bool:
        return f"{flag} / --no-{flag[2:]}"
    if field.metadata["choices"]:
        return f"{flag} {'|'.join(field.metadata['choices'])}"
    kind = plain_type(hint)
    item = item_type(kind)
    if item is not None:
        return f"{flag} {_TYPES[item]}[,{_TYPES[item]}...]"
    if issubclass(kind, Enum):
        return f"{flag} {'|'.join(kind)}"
    return f"{flag} {_TYPES.get(kind, 'TEXT')}"


def default_text(field: dataclasses.Field[Any]) -> str:
    """Return the default as text; empty if there is none or the help text names it."""
    if field.default is None or field.default == ():
        return ""
    if isinstance(field.default, tuple):
        return ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in field.default)
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


def settings_help(
    width: int, shown: Sequence[str], settings: type[Any], groups: Mapping[str, list[str]]
) -> Iterator[str]:
    """Yield lines for the settings in `shown`, by section."""
    hints = get_type_hints(settings)
    fields = {f.name: f for f in dataclasses.fields(settings)}
    for title, section in groups.items():
        names = [name for name in section if name in shown]
        if not names:
            continue
        yield ""
        yield f"{title}:"
        for name in names:
            default = default_text(fields[name])
            yield f"  {option_line(fields[name], hints[name])}"
            text = fields[name].metadata["help"] + (f" [default: {default}]" if default else "")
            yield from _wrapped(text, width)


def other_options(width: int, options: Sequence[Any]) -> Iterator[str]:
    """Yield lines for options that are not settings."""
    if options:
        yield from ("", "The run:")
    for each in options:
        kind = "" if each.is_flag else f" {each.metavar or 'TEXT'}"
        yield f"  {' / '.join([*each.opts, *each.secondary_opts])}{kind}"
        given = "" if each.default in (None, (), []) or each.is_flag else f" [default: {each.default}]"
        yield from _wrapped(f"{each.help}{given}", width)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)


class SettingsCommand(TyperCommand):
    """A command whose options are the settings of a dataclass (`Config` unless a subclass names another) and further
    ones."""

    settings: ClassVar[type[Any]] = Config
    groups = staticmethod(sections)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - click's own types, wherever typer keeps them
        width = min(WIDEST, shutil.get_terminal_size().columns)
        intro = textwrap.wrap(" ".join((self.help or "").split()), width)
        names = {f.name for f in dataclasses.fields(self.settings)}
        options = [each for each in self.params if each.param_type_name == "option" and each.name != "help"]
        shown = [str(each.name) for each in options if each.name in names]
        usage = " ".join([ctx.command_path, *self.collect_usage_pieces(ctx)])
        settings = settings_help(width, shown, self.settings, self.groups())
        others = other_options(width, [each for each in options if each.name not in names])
        print("\n".join([f"Usage: {usage}", "", *intro, *settings, *others, "", "  --help", ""]))
