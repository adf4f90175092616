"""Checks for options of `coserve bench` without effect: an error on the command line, a warning in a TOML file."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from coserve.cli.bench.run import Route, ServerKind
from coserve.core.errors import InvalidRequest
from coserve.workloads.opening import unused
from coserve.workloads.replay import Rest


def check_settings(settings: Mapping[str, object], given: Collection[str], file: Path | None) -> None:
    """Check the workload's settings. `given`: names of those from the command line; the others are from `file`.

    Raises `InvalidRequest` for a command-line setting without effect, prints a line for each of the file.
    """
    found = unused(settings)
    _refuse([f"--{name.replace('_', '-')} has no effect: {needs}" for name, needs in found.items() if name in given])
    others = [f"{name} has no effect: {needs}" for name, needs in found.items() if name not in given]
    if others:
        print(f"{file}: {'; '.join(others)}", file=sys.stderr)


def check_options(
    *, run: bool, conditions: bool, server: ServerKind, route: Route, model: str | None, rest: Rest
) -> None:
    """Raise `InvalidRequest` for an option of the run without effect."""
    any_server = server is ServerKind.OPENAI
    idle = {
        "--fail-under has no effect with --no-run": conditions and not run,
        "--route completions has no effect with --server openai": any_server and route is Route.COMPLETIONS,
        f"--rest {rest} has no effect with --server openai, which gets no jobs": any_server and rest is not Rest.CANCEL,
        "--model has no effect: it needs --server openai or --route completions": model is not None
        and not any_server
        and route is Route.GENERATE,
    }
    _refuse([text for text, found in idle.items() if found])


def _refuse(lines: list[str]) -> None:
    if lines:
        raise InvalidRequest("; ".join(lines))
