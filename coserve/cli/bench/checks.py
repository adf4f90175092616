"""Options of `coserve bench` that have no effect: on the command line they are errors, in a TOML file they are
named."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from coserve.cli.bench.run import Route, ServerKind
from coserve.core.errors import InvalidRequest
from coserve.workloads.opening import unused
from coserve.workloads.replay import Rest


def check_settings(settings: Mapping[str, object], given: Collection[str], file: Path | None) -> None:
    """`settings` of the workload; `given`: the names of those on the command line, the others are from `file`.

    Raises `InvalidRequest` for a setting of the command line without effect, prints a line for those of the file.
    """
    found = unused(settings)
    _refuse([f"--{name.replace('_', '-')} has no effect: {needs}" for name, needs in found.items() if name in given])
    others = [f"{name} has no effect: {needs}" for name, needs in found.items() if name not in given]
    if others:
        print(f"{file}: {'; '.join(others)}", file=sys.stderr)


def check_options(
    *, run: bool, conditions: bool, server: ServerKind, route: Route, model: str | None, rest: Rest
) -> None:
    """Raises `InvalidRequest` for an option of the run without effect."""
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
