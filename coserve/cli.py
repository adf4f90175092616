"""Every command. The options of `serve` are generated from `config.Config`; nothing here imports torch."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from coserve.config import Config, load_config
from coserve.errors import CoserveError, StartupError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="Fine-tune and serve many LoRA adapters.")
jobs_app = typer.Typer(no_args_is_help=True, help="List, watch and steer fine-tuning jobs.")
adapters_app = typer.Typer(no_args_is_help=True, help="List, import, download and delete adapters.")
app.add_typer(jobs_app, name="jobs")
app.add_typer(adapters_app, name="adapters")

Url = Annotated[str, typer.Option("--url", envvar="COSERVE_URL", help="where the daemon listens")]
Key = Annotated[str | None, typer.Option("--key", envvar="COSERVE_API_KEY", help="API key")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, one object a line")]
DEFAULT_URL = "http://127.0.0.1:8000"


def _with_config_options(run: Callable[[dict[str, object]], None]) -> Callable[..., None]:
    """A command with one option per setting; `run` gets the settings that were given."""
    hints = get_type_hints(Config)

    def command(**given: object) -> None:
        settings = {name: value for name, value in given.items() if value is not None}
        for name, value in settings.items():
            if isinstance(value, list):
                settings[name] = tuple(value)
        run({name: value for name, value in settings.items() if value != ()})

    parameters = []
    for f in dataclasses.fields(Config):
        kind = list[str] if hints[f.name] == tuple[str, ...] else hints[f.name]
        note = f.metadata["help"]
        if f.metadata["choices"]:
            note += f" [{'|'.join(f.metadata['choices'])}]"
        if f.default is not None and f.default != ():
            note += f" [default: {f.default}]"
        flag = f"--{f.name.replace('_', '-')}"
        declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        option = typer.Option(None, declared, help=note, show_default=False)
        annotation: Any = kind | None
        parameters.append(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = run.__doc__
    return command


def _serve(given: dict[str, object]) -> None:
    """Start the daemon. Settings also come from COSERVE_<NAME> and from the TOML file of --config."""
    config = load_config(given)
    from coserve.daemon import serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s api %(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(config, ready=lambda port: print(f"coserve listens on http://{config.host}:{port}", flush=True)))


app.command("serve")(_with_config_options(_serve))


@app.command("config")
def show_config(config: Annotated[Path | None, typer.Option(help="TOML file")] = None) -> None:
    """Print every setting with its value from the environment and the file."""
    loaded = load_config({"config": config} if config else {})
    for f in dataclasses.fields(Config):
        shown = "***" if f.name == "api_key" and loaded.api_key else getattr(loaded, f.name)
        print(f"{f.name} = {shown}")


def main() -> None:
    """The console script. A refused start or a failed request ends with one line, not with a traceback."""
    try:
        app()
    except StartupError as error:
        print(f"coserve: {error.message}", file=sys.stderr)
        sys.exit(2)
    except CoserveError as error:
        print(f"coserve: {error.code}: {error.message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
